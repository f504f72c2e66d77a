"""Three windows: what is added up, what the sum is divided by, and the updates."""

from __future__ import annotations

from matplotlib.figure import Figure

from benchmarks.pictures.drawing import (
    OURS,
    PALE,
    SMALL,
    USUAL,
    arrow,
    box,
    canvas,
    words,
)

FILE = "gradaccum/figures/window.svg"
WINDOWS = (("steps=4", 4), ("steps=4", 4), ("the data end: flush()", 2))
"""By window, why it ends, and its micro-batches."""


def picture() -> tuple[Figure, str]:
    """The picture and its description."""
    described = (f"{size} micro-batches, divided by {size}" for _, size in WINDOWS)
    return draw(), "; ".join(described)


def draw() -> Figure:
    row = 0.92
    figure, axes = canvas(row * len(WINDOWS) + 0.45)
    heading = row * len(WINDOWS) + 0.25
    columns = ((1.2, "add up"), (2.9, "divide by"), (3.95, "update"))
    for place, text in columns:
        words(axes, place, heading, text, ha="center", fontweight="bold")
    number = 0
    for index, (reason, size) in enumerate(WINDOWS):
        bottom = row * (len(WINDOWS) - 1 - index) + 0.12
        said = f"window {index + 1}, {reason}"
        words(axes, 0.1, bottom + 0.62, said, fontsize=SMALL, color=PALE)
        for place in range(size):
            number += 1
            corner = 0.1 + 0.58 * place, bottom
            box(axes, corner, (0.46, 0.42), f"{number}", OURS)
        middle = bottom + 0.21
        arrow(axes, (0.1 + 0.58 * size, middle), (2.62, middle), color=OURS)
        words(axes, 2.9, middle, f"{size}", ha="center", fontweight="bold")
        arrow(axes, (3.15, middle), (3.72, middle), color=USUAL)
        box(axes, (3.74, bottom), (0.42, 0.42), f"{index + 1}", USUAL)
    return figure
