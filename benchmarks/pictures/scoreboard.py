"""The scoreboard as bars: of each package the loop that is farthest off."""

from __future__ import annotations

import json
from typing import NamedTuple

from matplotlib.figure import Figure

from benchmarks.pictures.drawing import INK, OURS, ROOT, SMALL, USUAL, figure_of
from benchmarks.scoreboard.rows import ROWS

FILE = "benchmarks/figures/scoreboard.svg"
LIMIT = 1.35
"""Bars end here; their numbers go on."""


class Bar(NamedTuple):
    """One package."""

    package: str
    distance: float
    """How far the gradient of its worst loop is from the large batch's, by that."""
    cause: str
    others: tuple[float, ...]
    """The distances of its other loops."""


def bars() -> list[Bar]:
    """The packages, the farthest first, of what was measured."""
    measured = json.loads(
        (ROOT / "benchmarks/scoreboard/results.json").read_text(encoding="utf-8")
    )
    loops: dict[str, list[tuple[float, str]]] = {}
    for row in ROWS:
        distance = measured[row.place]["unequal"]["distance"]
        loops.setdefault(row.package, []).append((distance, row.cause))
    found = []
    for package, its_loops in loops.items():
        (distance, cause), *others = sorted(its_loops, reverse=True)
        found.append(Bar(package, distance, cause, tuple(each for each, _ in others)))
    return sorted(found, key=lambda bar: (-bar.distance, bar.package))


def picture() -> tuple[Figure, str]:
    """The picture and its description."""
    shown = bars()
    return draw(shown), description(shown)


def description(shown: list[Bar]) -> str:
    return "; ".join(f"{bar.package} {_percent(bar.distance)}" for bar in shown)


def draw(shown: list[Bar]) -> Figure:
    figure, axes = figure_of(0.9 + 0.29 * len(shown))
    for place, bar in enumerate(shown):
        length = min(bar.distance, LIMIT)
        axes.barh(place, length, height=0.72, color=USUAL)
        if bar.distance > LIMIT:
            cut = [LIMIT - 0.06, LIMIT - 0.03]
            axes.plot(cut, [place + 0.5, place - 0.5], color="white", lw=2)
        for other in bar.others:
            axes.plot(other, place + 0.34, "o", ms=4.5, mfc="white", mec=INK, zorder=5)
        text = f"{_percent(bar.distance)}  {bar.cause or 'the same'}"
        inside = length > LIMIT / 2
        axes.annotate(
            text,
            (length, place),
            xytext=(-18 if bar.distance > LIMIT else -5 if inside else 5, 0),
            textcoords="offset points",
            ha="right" if inside else "left",
            va="center",
            fontsize=SMALL,
            color="white" if inside else INK if bar.cause else OURS,
        )
    axes.set_yticks(range(len(shown)), [bar.package for bar in shown], fontsize=SMALL)
    for label, bar in zip(axes.get_yticklabels(), shown, strict=True):
        label.set_fontweight("bold" if bar.package == "gradaccum" else "normal")
    axes.set(ylim=(len(shown) - 0.4, -0.6), xlim=(-0.02, LIMIT))
    axes.set_xticks([0, 0.5, 1], ["0", "50 %", "100 %"])
    axes.set_xlabel("distance to its own large batch's gradient", fontsize=SMALL)
    axes.set_title(
        "The worst loop of each package (bar)\nand its other loops (circles)",
        fontsize=SMALL,
        loc="left",
    )
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0)
    return figure


def _percent(distance: float) -> str:
    return f"{100 * distance:.1f} %" if 0.001 < distance < 0.01 else f"{distance:.0%}"
