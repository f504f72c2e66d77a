"""The form of a fault that is planted in the example backend."""

from __future__ import annotations

from typing import NamedTuple


class Mutant(NamedTuple):
    """A fault, and what catches it."""

    name: str
    changes: dict[str, str]
    """Texts that stand once in the sources of the example, or of the reference's
    harness, which the example's inherits; and what stands there instead.
    """
    test: str = ""
    """What ``pytest -k`` takes, for a fault that the suite would catch late."""


def changed(mutant: Mutant, sources: dict[str, str]) -> dict[str, str]:
    """Return the sources in which the fault stands, by the names of their modules.

    Raises:
        ValueError: a text does not stand once in the sources.
    """
    texts = dict(sources)
    for old, new in mutant.changes.items():
        if sum(text.count(old) for text in texts.values()) != 1:
            raise ValueError(f"{mutant.name}: this must stand once: {old}")
        texts = {name: text.replace(old, new) for name, text in texts.items()}
    return {name: text for name, text in texts.items() if text != sources[name]}
