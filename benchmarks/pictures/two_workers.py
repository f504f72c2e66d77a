"""The reductions of two workers of torch in a window of four micro-batches."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from benchmarks.contestants.torch_ddp import by_hand, wrapped
from benchmarks.pictures.drawing import (
    OURS,
    PALE,
    SMALL,
    USUAL,
    box,
    canvas,
    words,
)
from benchmarks.questions.torch_workers import Setting, counted
from benchmarks.two_workers import WORKERS
from conformance_tests.framework_tests.torch_mirror import mirror

FILE = "gradaccum/figures/two_workers.svg"
SETTING = Setting("66 k")
LOOPS = {
    "DDP in each micro-batch": (by_hand(every=True), USUAL),
    "DDP under no_sync": (by_hand(), PALE),
    "gradaccum": (wrapped(), OURS),
}
"""By loop, its window and its colour."""
SENT = {
    "DDP in each micro-batch": "gradients; workers count the same",
    "DDP under no_sync": "gradients; workers count the same",
    "gradaccum": "weights and flags, then gradients; items count",
}
"""By loop, what a reduction holds."""
Counts = Mapping[str, Mapping[str, float]]


def counts() -> Counts:
    """By loop, the reductions of a window and the bytes that a worker hands to them, of
    66,000 parameters in float32.
    """
    torch.set_num_threads(1)
    with mirror(WORKERS):
        return {
            name: counted(name, recipe, SETTING) for name, (recipe, _) in LOOPS.items()
        }


def picture() -> tuple[Figure, str]:
    """The picture and its description."""
    shown = counts()
    return draw(shown), description(shown)


def description(shown: Counts) -> str:
    return "; ".join(f"{name}: {_words(found)}" for name, found in shown.items())


def draw(shown: Counts) -> Figure:
    panel = 1.55
    figure, axes = canvas(panel * len(shown) + 0.1)
    for place, (name, (_, color)) in enumerate(LOOPS.items()):
        top = panel * (len(shown) - place)
        words(axes, 0.1, top - 0.1, name, fontweight="bold", color=color)
        for row in range(WORKERS):
            height = top - 0.66 - 0.44 * row
            words(axes, 0.1, height + 0.18, f"worker {row + 1}", fontsize=SMALL)
            for index in range(SETTING.steps):
                corner = 0.95 + 0.85 * index, height
                box(axes, corner, (0.5, 0.36), f"{index + 1}", PALE, fontsize=SMALL)
        each_time = shown[name]["reductions"] >= SETTING.steps
        ends = range(SETTING.steps) if each_time else [SETTING.steps - 1]
        for index in ends:
            corner = 1.53 + 0.85 * index, top - 1.1
            axes.add_patch(Rectangle(corner, 0.16, 0.8, facecolor=color))
        said = f"{_words(shown[name])}: {SENT[name]}"
        words(axes, 0.1, top - 1.26, said, fontsize=SMALL)
    return figure


def _words(found: Mapping[str, float]) -> str:
    return (
        f"{found['reductions']} x {found['bytes'] / found['reductions'] / 1e3:.0f} kB"
    )
