"""Names of leaves, where a pytree node may report one key for several children."""

from __future__ import annotations

from collections.abc import Iterable


def unique(names: Iterable[str]) -> list[str]:
    """`names` in their order, with a prime at each that was there before: no leaf hides another."""
    seen: dict[str, None] = {}
    for name in names:
        while name in seen:
            name += "'"
        seen[name] = None
    return list(seen)
