"""MindSpore: time and memory of a window as a model of constant size is cut into ever more tensors, in GRAPH_MODE.

Every tensor is an operator of its own in the graph, for whoever accumulates, and compiling takes more than proportional time. gradaccum's
graph has a norm of two kinds and a division beside it.
"""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.axes import COMPILED_TENSORS, LARGE, STEPS, in_words
from benchmarks.case import Case
from benchmarks.questions.mindspore_window_length import make_case


def cases(quick: bool) -> Iterator[Case]:
    for tensors in COMPILED_TENSORS[:1] if quick else COMPILED_TENSORS:
        yield make_case(in_words(tensors, LARGE), tensors, steps=STEPS, tensors=tensors, elements=LARGE, run=STEPS)
