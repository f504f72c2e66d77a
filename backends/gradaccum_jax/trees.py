"""Trees as others build them: flax nnx's variables, None in place of a leaf, two leaves under one path."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax


def plain(tree: Any) -> Any:
    """`tree` with the array of each flax nnx variable in the variable's place, as `flax.nnx.pure` does; other trees as they are.

    Known by an attribute, so that flax need not be installed.
    """
    return jax.tree.map(lambda node: node[...] if _is_variable(node) else node, tree, is_leaf=_is_variable)


def _is_variable(node: Any) -> bool:
    return hasattr(type(node), "raw_value")


def is_none(node: Any) -> bool:
    """Whether `node` is None: ``is_leaf=is_none`` keeps the place of a leaf that is not there."""
    return node is None


def unique(names: Iterable[str]) -> list[str]:
    """`names` in their order, with a prime at each that was there before: no leaf hides another."""
    seen: dict[str, None] = {}
    for name in names:
        while name in seen:
            name += "'"
        seen[name] = None
    return list(seen)
