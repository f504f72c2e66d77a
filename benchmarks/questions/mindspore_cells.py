"""MindSpore, GRAPH_MODE, Adam: gradaccum's training cell beside the older tutorial's
three cells, and beside these made right by hand.

On a CPU the training cell chooses its program on the host, as the loop of three cells
does, so no graph has a branch. Without checks it does what the three cells do; with
checks it measures the norm and looks for an overflow, as the loop made right by hand
does.

"no window ends" is the tutorials' accumulator that only adds: what it falls short of 1
is all that any end of a window could save.
"""

from __future__ import annotations

from collections.abc import Iterator

import mindspore as ms

import gradaccum
from benchmarks.case import Case
from benchmarks.contestants.mindspore_cells import (
    CheckedAccumulator,
    Contestant,
    checked_cells,
    in_one_graph,
    three_cells,
    training_cell,
)
from benchmarks.contestants.mindspore_peers import (
    STEPS,
    Net,
    TutorialAccumulator,
    batch,
)

TUTORIAL = "three cells"
RIGHT = "three cells made right by hand"
NO_END = 10**6
"""Micro-batches of a window that does not end here."""
ONE_GRAPH, RIGHT_GRAPH = (
    "the tutorials' accumulator",
    "the accumulator made right by hand",
)
SIZES = {
    "4 x 64^2, 8 items": (64, 8),
    "4 x 256^2, 8 items": (256, 8),
    "4 x 512^2, 8 items": (512, 8),
}
"""(width, items of a micro-batch)."""


def cases(quick: bool) -> Iterator[Case]:
    ms.set_context(mode=ms.GRAPH_MODE)
    for name, (width, items) in list(SIZES.items())[: 2 if quick else None]:
        x = batch(items, width)
        checked = training_cell(width, x)
        cells = {
            TUTORIAL: three_cells(width, x),
            "gradaccum": training_cell(width, x, on_overflow="ignore"),
            "gradaccum, weights": training_cell(
                width, x, on_overflow="ignore", weighs=True
            ),
            "gradaccum, checks": checked,
        }
        right = {
            RIGHT: checked_cells(width, x),
            "gradaccum": checked,
            "gradaccum, weights": training_cell(width, x, weighs=True),
        }
        yield _case(f"{name}, training cell", TUTORIAL, cells)
        yield _case(f"{name}, training cell, checked", RIGHT, right)
        graphs = {
            ONE_GRAPH: in_one_graph(TutorialAccumulator, Net(width, STEPS), x),
            "gradaccum": in_one_graph(
                lambda optimizer: gradaccum.wrap(
                    optimizer, steps=STEPS, on_overflow="ignore"
                ),
                Net(width),
                x,
            ),
        }
        checked_graphs = {
            RIGHT_GRAPH: in_one_graph(CheckedAccumulator, Net(width), x),
            "gradaccum": in_one_graph(
                lambda optimizer: gradaccum.wrap(optimizer, steps=STEPS), Net(width), x
            ),
            "no window ends": in_one_graph(
                lambda optimizer: TutorialAccumulator(optimizer, NO_END),
                Net(width, STEPS),
                x,
            ),
        }
        yield _case(f"{name}, one graph", ONE_GRAPH, graphs)
        yield _case(f"{name}, one graph, checked", RIGHT_GRAPH, checked_graphs)


def _case(name: str, baseline: str, contestants: dict[str, Contestant]) -> Case:
    windows = {label: window for label, (window, _) in contestants.items()}
    return Case(
        name,
        baseline,
        windows,
        {label: counts for label, (_, counts) in contestants.items()},
    )
