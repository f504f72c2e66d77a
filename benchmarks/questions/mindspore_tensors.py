"""MindSpore: time and memory of a window as a model of constant size is cut into ever
more tensors, in GRAPH_MODE.

Every tensor is an operator of its own in the graph, for whoever accumulates, and
compiling takes more than proportional time. gradaccum's graph has a division beside it,
and with checks a norm of two kinds; the training cell has a graph for the end of a
window.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.axes import COMPILED_TENSORS, LARGE, STEPS, in_words
from benchmarks.case import Case
from benchmarks.questions.mindspore_window_length import (
    Cells,
    in_one_graph,
    in_training_cell,
    make_case,
)


def without_checks(net: Any, steps: int) -> Cells:
    """A step that applies whatever the window holds."""
    return in_one_graph(net, steps, on_overflow="ignore")


MORE = {
    "gradaccum, no checks": without_checks,
    "gradaccum, training cell": in_training_cell,
}


def cases(quick: bool) -> Iterator[Case]:
    for tensors in COMPILED_TENSORS[:1] if quick else COMPILED_TENSORS:
        yield make_case(
            in_words(tensors, LARGE),
            tensors,
            steps=STEPS,
            tensors=tensors,
            elements=LARGE,
            run=STEPS,
            more=MORE,
        )
