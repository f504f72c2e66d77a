"""The colours and sizes of the pictures, and the files that they are written to."""

from __future__ import annotations

import re
from html import unescape
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

ROOT = Path(__file__).parents[2]
OURS, LARGE, USUAL = "#0072b2", "#b4b4b4", "#d55e00"
"""The colours of gradaccum, of the large batch, and of the usual loop."""
INK, PALE = "#1f2937", "#6b7280"
WIDTH = 4.5
"""Inches. A telephone shows it at 0.83 of its size."""
POINTS, SMALL = 11, 9.5
STYLE: dict[Any, Any] = {
    "font.size": POINTS,
    "axes.labelsize": POINTS,
    "text.color": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    # the same file from the same numbers
    "svg.hashsalt": "gradaccum",
    "svg.fonttype": "path",
}


def figure_of(height: float) -> tuple[Figure, Axes]:
    """A figure of `height` inches with one pair of axes."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        return figure, figure.subplots()


def canvas(height: float) -> tuple[Figure, Axes]:
    """A figure whose axes are not shown and count in inches from its lower left
    corner.
    """
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, height))
        axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, WIDTH), ylim=(0, height))
    axes.set_axis_off()
    return figure, axes


def box(
    axes: Axes,
    corner: tuple[float, float],
    size: tuple[float, float],
    text: str,
    color: str,
    **font: Any,
) -> None:
    """A box with rounded corners, and text in the middle of it."""
    shape = FancyBboxPatch(
        corner,
        *size,
        boxstyle="round,pad=0,rounding_size=0.06",
        facecolor=f"{color}22",
        edgecolor=color,
        linewidth=1.2,
    )
    axes.add_patch(shape)
    words(
        axes,
        corner[0] + size[0] / 2,
        corner[1] + size[1] / 2,
        text,
        ha="center",
        **font,
    )


def words(axes: Axes, x: float, y: float, text: str, **font: Any) -> None:
    axes.text(x, y, text, **{"va": "center", "fontsize": POINTS, "color": INK, **font})


def arrow(
    axes: Axes,
    start: tuple[float, float],
    end: tuple[float, float],
    color: str = INK,
    bend: float = 0.0,
) -> None:
    shape = FancyArrowPatch(
        start,
        end,
        arrowstyle="-|>",
        mutation_scale=12,
        color=color,
        linewidth=1.3,
        connectionstyle=f"arc3,rad={bend}",
        shrinkA=0,
        shrinkB=0,
    )
    axes.add_patch(shape)


def write(figure: Figure, path: Path, description: str) -> None:
    """Write the picture to `path`, with its description inside."""
    path.parent.mkdir(parents=True, exist_ok=True)
    facts = {"Date": None, "Creator": None, "Description": description}
    with mpl.rc_context(STYLE):
        figure.savefig(path, format="svg", metadata=facts, facecolor="white")
    # matplotlib leaves blanks at the end of lines
    text = path.read_text(encoding="utf-8")
    path.write_text(re.sub(r" +$", "", text, flags=re.MULTILINE), encoding="utf-8")


def description_of(path: Path) -> str:
    """Return the description inside of a picture."""
    text = path.read_text(encoding="utf-8")
    (description,) = re.findall(
        r"<dc:description>(.*?)</dc:description>", text, re.DOTALL
    )
    return unescape(description)
