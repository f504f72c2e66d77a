"""MindSpore, `mindspore.jit`, Adam: the question of `mindspore_streaming` for steps
that Python calls as jitted functions.

The floor is made of GRAPH Cells, and so are the three cells, because a jitted function
without control flow takes several times as long as the same graph as a Cell. All share
one process: the mode is set for the time of a contestant's turn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import mindspore as ms

import gradaccum
from benchmarks.case import Case
from benchmarks.contestants.mindspore_peers import (
    STEPS,
    Boost,
    Net,
    TrainStep,
    TutorialAccumulator,
    adam,
    batch,
    buffers,
    window_of,
)
from benchmarks.questions.mindspore_streaming import (
    BASELINE,
    FLOOR,
    SIZES,
    Contestant,
    floor,
    three_cells,
)

THREE_CELLS = "three GRAPH cells"


def cases(quick: bool) -> Iterator[Case]:
    for name, (width, items) in list(SIZES.items())[: 2 if quick else None]:
        x = batch(items, width)
        contestants = {
            BASELINE: _jitted(TutorialAccumulator, Net(width, STEPS), x),
            "gradaccum": _jitted(
                lambda optimizer: gradaccum.wrap(optimizer, steps=STEPS), Net(width), x
            ),
            "boost.GradientAccumulation": _jitted(Boost, Net(width), x),
            THREE_CELLS: _in_graph_mode(three_cells, Net(width, STEPS), x),
            FLOOR: _in_graph_mode(floor, Net(width), x),
        }
        windows = {label: window for label, (window, _) in contestants.items()}
        yield Case(
            name,
            BASELINE,
            windows,
            {label: counts for label, (_, counts) in contestants.items()},
        )


def _jitted(accumulation: Callable[[Any], Any], net: Net, x: Any) -> Contestant:
    take = accumulation(adam(net))
    return window_of(ms.jit(TrainStep(net, take).construct), net, x), buffers(
        take, net=net
    )


def _in_graph_mode(
    make: Callable[[Net, Any], Contestant], net: Net, x: Any
) -> Contestant:
    window, counts = make(net, x)

    def switched() -> object:
        ms.set_context(mode=ms.GRAPH_MODE)
        try:
            return window()
        finally:
            ms.set_context(mode=ms.PYNATIVE_MODE)

    return switched, counts
