"""The state machine: micro-batch, window, and its end in eight steps."""

from __future__ import annotations

from matplotlib.figure import Figure

from benchmarks.pictures.drawing import (
    INK,
    OURS,
    PALE,
    SMALL,
    USUAL,
    arrow,
    box,
    canvas,
    words,
)

FILE = "gradaccum/figures/state_machine.svg"
STEPS = (
    ("Reduce", "gradients, weights, flags: once"),
    ("Divide", "by the loss scale and the weight"),
    ("Measure", "the norm; is it finite?"),
    ("Decide", "update, clipped or not, or skip"),
    ("Update", "the optimizer runs, or does not"),
    ("Clear", "the sum"),
    ("Adjust", "the loss scale"),
    ("Count", "optimizer_step or skipped_windows"),
)
"""The steps at a window's end, as the page on concepts has it."""


def picture() -> tuple[Figure, str]:
    """The picture and its description."""
    return draw(), "; ".join(f"{name}: {what}" for name, what in STEPS)


def draw() -> Figure:
    figure, axes = canvas(5.2)
    box(axes, (0.15, 4.2), (1.1, 0.55), "empty", PALE)
    box(axes, (2.75, 4.2), (1.6, 0.55), "open window", OURS)
    arrow(axes, (1.25, 4.58), (2.75, 4.58))
    words(axes, 2.0, 4.72, "micro-batch", ha="center", fontsize=SMALL)
    arrow(axes, (2.75, 4.34), (1.25, 4.34))
    words(axes, 2.0, 4.2, "discard()", ha="center", fontsize=SMALL)
    arrow(axes, (3.2, 4.75), (3.9, 4.75), bend=-1.1)
    words(axes, 3.1, 5.02, "micro-batch", ha="right", fontsize=SMALL)
    arrow(axes, (3.55, 4.2), (3.55, 3.35))
    ending = "micro-batch number\n'steps', or flush()"
    words(axes, 3.45, 3.78, ending, ha="right", fontsize=SMALL)
    box(axes, (0.15, 0.12), (4.2, 3.23), "", USUAL)
    words(axes, 0.85, 3.12, "the window closes", fontweight="bold")
    for index, (name, what) in enumerate(STEPS):
        height = 2.77 - 0.335 * index
        words(axes, 0.85, height, f"{index + 1}", color=USUAL, fontweight="bold")
        words(axes, 1.05, height, name, fontsize=SMALL, fontweight="bold")
        words(axes, 1.78, height, what, fontsize=SMALL)
    arrow(axes, (0.45, 0.42), (0.45, 4.2), color=INK)
    return figure
