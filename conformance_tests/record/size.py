"""The tokens of each area, and the rates of style: figures that may only fall.

A write of the whole record keeps the lower figure. A rise that is meant is written by
``python -m conformance_tests.record --part size --write``.
"""

from __future__ import annotations

from collections.abc import Iterator

from conformance_tests.measure_tokens import LIMITS, PACKAGES, measure, tokens_by_area

from .facts import Facts

SECTION = "size"


def found() -> Facts:
    figures: dict[str, float] = {}
    for area, counts in tokens_by_area().items():
        for package, tokens in counts.items():
            figures[f"tokens, {package}, {area}"] = tokens
    everything = measure(*PACKAGES.values()).figures()
    for name in LIMITS:
        figures[name] = everything[name]
    return _facts(figures)


def rises(held: Facts, now: Facts) -> Iterator[str]:
    """The figures that are higher than the record's, or that it does not have."""
    before = _figures(held)
    for name, figure in _figures(now).items():
        if name not in before:
            yield f"{name}: {figure:g}, new"
        elif figure > before[name]:
            yield f"{name}: {figure:g}, was {before[name]:g}"


def fallen(held: Facts, now: Facts) -> Facts:
    """The record with what fell, and without what is no more."""
    figures = _figures(now)
    return _facts(
        {
            name: min(before, figures[name])
            for name, before in _figures(held).items()
            if name in figures
        }
    )


def _facts(figures: dict[str, float]) -> Facts:
    lines = [
        f"{name}: {figure if isinstance(figure, int) else round(figure, 1)}"
        for name, figure in figures.items()
    ]
    return {SECTION: lines}


def _figures(facts: Facts) -> dict[str, float]:
    pairs = (fact.rpartition(": ") for fact in facts.get(SECTION, []))
    return {
        name: float(figure) if "." in figure else int(figure)
        for name, _, figure in pairs
    }
