"""MindSpore, GRAPH_MODE, Adam: what a window costs beside what people use today, and
how far it is from the floor.

``benchmarks/README.md`` counts the passes over memory and, for small models, the
operators.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import mindspore as ms

import gradaccum
from benchmarks.case import Case
from benchmarks.contestants.mindspore_peers import (
    STEPS,
    Add,
    Boost,
    Clear,
    Gradient,
    Net,
    TrainStep,
    TutorialAccumulator,
    Update,
    adam,
    batch,
    buffers,
    window_of,
)

BASELINE = "the tutorials' accumulator"
FLOOR = "floor: 8 gradients, 1 update"
SIZES = {
    "4 x 64^2, 8 items": (64, 8),
    "4 x 256^2, 8 items": (256, 8),
    "4 x 1024^2, 8 items": (1024, 8),
    "4 x 1024^2, 256 items": (1024, 256),
}
"""(width, items of a micro-batch)."""

Contestant = tuple[Callable[[], object], dict[str, float]]


def cases(quick: bool) -> Iterator[Case]:
    ms.set_context(mode=ms.GRAPH_MODE)
    for name, (width, items) in list(SIZES.items())[: 2 if quick else None]:
        x = batch(items, width)
        contestants = {
            BASELINE: _taking(TutorialAccumulator, Net(width, STEPS), x),
            "gradaccum": _taking(
                lambda optimizer: gradaccum.wrap(optimizer, steps=STEPS), Net(width), x
            ),
            "gradaccum, ignoring overflow": _taking(
                lambda optimizer: gradaccum.wrap(
                    optimizer, steps=STEPS, on_overflow="ignore"
                ),
                Net(width),
                x,
            ),
            "three cells": three_cells(Net(width, STEPS), x),
            "boost.GradientAccumulation": _taking(Boost, Net(width), x),
            FLOOR: floor(Net(width), x),
        }
        windows = {label: window for label, (window, _) in contestants.items()}
        yield Case(
            name,
            BASELINE,
            windows,
            {label: counts for label, (_, counts) in contestants.items()},
        )


def _taking(accumulation: Callable[[Any], Any], net: Net, x: Any) -> Contestant:
    take = accumulation(adam(net))
    return window_of(TrainStep(net, take), net, x), buffers(take, net=net)


def three_cells(net: Net, x: Any) -> Contestant:
    """Forward, backward and addition; update; clear: three Cells that Python calls in
    turn.
    """
    optimizer = adam(net)
    sums, zeros = (
        optimizer.parameters.clone(prefix=prefix, init="zeros")
        for prefix in ("sum", "zero")
    )
    update, clear = Update(optimizer, sums), Clear(sums, zeros)
    return window_of(TrainStep(net, Add(sums)), net, x, update, clear), buffers(
        update, clear, net=net
    )


def floor(net: Net, x: Any) -> Contestant:
    """What must be done: `STEPS` gradients, each forgotten, and one update with the
    last.
    """
    gradient, optimizer = Gradient(net), adam(net)
    last: list[Any] = []

    def step(x: Any) -> None:
        last[:] = gradient(x)

    return window_of(step, net, x, lambda: optimizer(tuple(last))), {}
