"""MindSpore: time and memory by window length, at the same number of micro-batches, in
GRAPH_MODE.

Longer windows mean fewer updates, so the time falls and then stays: what is left is the
micro-batch. Memory is counted in Parameters, because a zero-filled one takes no room
before it is written. The first window compiles: what it takes more than the second is
counted.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

os.environ.setdefault("GLOG_v", "3")

import mindspore as ms
import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops

import gradaccum
from benchmarks.axes import FEW, RUN, SMALL, sizes
from benchmarks.case import Case
from benchmarks.contestants.mindspore_peers import TutorialAccumulator
from gradaccum_mindspore import TrainOneStepCell

BASELINE = "the tutorials' accumulator"
WINDOWS = (1, 16, 256)
"""Each graph is compiled anew."""
QUICK_WINDOWS = (16,)
Cells = tuple[Any, Any]
"""A step, and the Cell that holds its state."""
ZERO = Tensor(0.0, ms.float32)
"""An input for the network, which needs none: its loss depends on its parameters alone.
"""


class Model(nn.Cell):  # type: ignore[misc]
    """Half the sum of squares of all parameters, which are of one size."""

    def __init__(self, tensors: int, elements: int) -> None:
        super().__init__()
        random = np.random.default_rng(0)
        values = [
            random.standard_normal(size).astype(np.float32)
            for size in sizes(tensors, elements)
        ]
        self.leaves = ParameterTuple(
            [
                Parameter(Tensor(value), name=f"leaf{index}")
                for index, value in enumerate(values)
            ]
        )
        self.map = ops.HyperMap()

    def construct(self, offset: Any) -> Any:
        return offset + 0.5 * ops.addn(self.map(_sum_of_squares, self.leaves))


class Step(nn.Cell):  # type: ignore[misc]
    """Forward, backward and whatever takes the gradients; returns the loss."""

    def __init__(self, net: Any, take: Any) -> None:
        super().__init__(auto_prefix=False)
        self.take = take
        self.net = net
        self.weights = ParameterTuple(net.trainable_params())
        self.gradient = ms.value_and_grad(net, None, self.weights)

    def construct(self, offset: Any) -> Any:
        loss, gradients = self.gradient(offset)
        return ops.depend(loss, self.take(gradients))


def cases(quick: bool) -> Iterator[Case]:
    for steps in QUICK_WINDOWS if quick else WINDOWS:
        yield make_case(
            f"windows of {steps}",
            steps,
            steps=steps,
            tensors=FEW,
            elements=SMALL,
            run=RUN,
        )


def make_case(
    name: str,
    x: float,
    *,
    steps: int,
    tensors: int,
    elements: int,
    run: int,
    more: Mapping[str, Callable[[Any, int], Cells]] | None = None,
) -> Case:
    """`run` micro-batches in windows of `steps`, a divisor of it, over a model of
    `elements` in equal `tensors`.

    `more` contestants: of a network and the window's length each gives its step, and
    who holds its state.
    """
    ms.set_context(mode=ms.GRAPH_MODE)
    nets = {
        label: Model(tensors, elements)
        for label in (BASELINE, "gradaccum", *(more or {}))
    }
    cells = {
        label: make(nets[label], steps)
        for label, make in {
            BASELINE: tutorial,
            "gradaccum": in_one_graph,
            **(more or {}),
        }.items()
    }
    counts = {
        label: {
            "bytes held": held_bytes(holder, nets[label]),
            "s to compile": _seconds(_loop(step, steps)),
        }
        for label, (step, holder) in cells.items()
    }
    contestants = {label: _loop(step, run) for label, (step, _) in cells.items()}
    return Case(
        name,
        BASELINE,
        contestants,
        counts,
        x=x,
        rates={label: {"micro-batches/s": run} for label in cells},
    )


def tutorial(net: Any, steps: int) -> Cells:
    """A step with the tutorials' accumulator."""
    taker = TutorialAccumulator(_adam(net), steps)
    return Step(net, taker), taker


def in_one_graph(net: Any, steps: int, **options: Any) -> Cells:
    """A step with a wrapped optimizer."""
    taker = gradaccum.wrap(_adam(net), steps=steps, **options)
    return Step(net, taker), taker


def in_training_cell(net: Any, steps: int) -> Cells:
    """`gradaccum_mindspore.TrainOneStepCell`, whose window is two programs."""
    taker = gradaccum.wrap(_adam(net), steps=steps)
    return TrainOneStepCell(net, taker, None), taker


def held_bytes(taker: Any, net: Any) -> float:
    """Bytes of all Parameters but the model's and Adam's two moments of each; scalars
    not counted.
    """
    own = {id(parameter) for parameter in net.trainable_params()}
    found = {
        id(parameter): parameter.nbytes
        for parameter in taker.get_parameters()
        if parameter.size > 1
    }
    return float(
        sum(found[key] for key in found.keys() - own)
        - 2 * sum(parameter.nbytes for parameter in net.trainable_params())
    )


def _sum_of_squares(leaf: Any) -> Any:
    return ops.square(leaf).sum()


def _adam(net: Any) -> Any:
    return nn.Adam(net.trainable_params(), learning_rate=1e-4)


def _seconds(window: Callable[[], object]) -> float:
    """What compiling takes: the first window less the second."""
    times = []
    for _ in range(2):
        begin = time.perf_counter()
        window()
        times.append(time.perf_counter() - begin)
    return times[0] - times[1]


def _loop(step: Any, count: int) -> Callable[[], object]:
    def loop() -> object:
        for _ in range(count):
            loss = step(ZERO)
        return loss.asnumpy()

    return loop
