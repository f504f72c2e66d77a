"""MindSpore, PyNative, Adam: what a window costs beside the loops that people write
without compiling anything.

The floor has the gradients and the update, operator by operator as all others. One
contestant is not of this mode: the tutorials' accumulator in a jitted step, which shows
what compiling is worth: what a step takes operator by operator is nearly all its
gradient, so no accumulator in PyNative can come near it.

By default PyNative hands most operators to another thread, and how long a window takes
is decided by how soon that thread wakes. The synchronous cases
(``pynative_synchronize``) run each operator where it is called: faster for operators as
small as these, and steadier.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import mindspore as ms
from mindspore import ops

import gradaccum
from benchmarks.case import Case
from benchmarks.contestants.mindspore_peers import (
    STEPS,
    Boost,
    Gradient,
    Net,
    TrainStep,
    TutorialAccumulator,
    adam,
    batch,
    buffers,
    window_of,
)
from benchmarks.questions.mindspore_streaming import FLOOR, SIZES, Contestant, floor

BASELINE = "the tutorials' accumulator"
COMPILED = "the same in a jitted step"
HAND_LOOP = "hand-written loop"


def cases(quick: bool) -> Iterator[Case]:
    for synchronous in (True, False):
        ms.set_context(pynative_synchronize=synchronous)
        for name, (width, items) in list(SIZES.items())[: 2 if quick else None]:
            yield _case(
                f"{name}{', synchronous' * synchronous}", width, batch(items, width)
            )


def _case(name: str, width: int, x: Any) -> Case:
    contestants = {
        BASELINE: _taking(TutorialAccumulator, Net(width, STEPS), x),
        "gradaccum": _taking(
            lambda optimizer: gradaccum.wrap(optimizer, steps=STEPS), Net(width), x
        ),
        HAND_LOOP: _hand_loop(Net(width, STEPS), x),
        "boost.GradientAccumulation": _taking(Boost, Net(width), x),
        COMPILED: _compiled(Net(width, STEPS), x),
        FLOOR: floor(Net(width), x),
    }
    windows = {label: window for label, (window, _) in contestants.items()}
    return Case(
        name,
        BASELINE,
        windows,
        {label: counts for label, (_, counts) in contestants.items()},
    )


def _taking(accumulation: Callable[[Any], Any], net: Net, x: Any) -> Contestant:
    gradient, take = Gradient(net), accumulation(adam(net))
    return window_of(lambda batch: take(gradient(batch)), net, x), buffers(
        take, net=net
    )


def _compiled(net: Net, x: Any) -> Contestant:
    take = TutorialAccumulator(adam(net))
    return window_of(ms.jit(TrainStep(net, take).construct), net, x), buffers(
        take, net=net
    )


def _hand_loop(net: Net, x: Any) -> Contestant:
    """Sums in a Python list: the first gradients as they are, the others added,
    forgotten after the update.
    """
    gradient, optimizer = Gradient(net), adam(net)
    sums: list[Any] = []

    def step(batch: Any) -> None:
        gradients = gradient(batch)
        sums[:] = (
            [ops.add(total, g) for total, g in zip(sums, gradients, strict=True)]
            if sums
            else gradients
        )

    def end() -> None:
        optimizer(tuple(sums))
        sums.clear()

    return window_of(step, net, x, end), {"buffers of the model's size": 1.0}
