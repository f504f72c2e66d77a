"""MindSpore: time and memory as the window grows, at the same number of micro-batches, in GRAPH_MODE.

Longer windows mean fewer updates, so the time falls and then stays: what is left is the micro-batch. Memory is counted in Parameters,
because a zero-filled one takes no room before it is written.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

os.environ.setdefault("GLOG_v", "3")

import mindspore as ms
import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops

import gradaccum
from benchmarks.axes import FEW, RUN, SMALL, sizes
from benchmarks.case import Case

BASELINE = "the tutorials' accumulator"
WINDOWS = (1, 16, 256)
"""Each graph is compiled anew."""
QUICK_WINDOWS = (16,)


class Model(nn.Cell):  # type: ignore[misc]
    """Half the sum of squares of all parameters, which are of one size."""

    def __init__(self, tensors: int, elements: int) -> None:
        super().__init__()
        random = np.random.default_rng(0)
        values = [random.standard_normal(size).astype(np.float32) for size in sizes(tensors, elements)]
        self.leaves = ParameterTuple([Parameter(Tensor(value), name=f"leaf{index}") for index, value in enumerate(values)])

    def construct(self, scale: Any) -> Any:
        total = scale
        for leaf in self.leaves:
            total = total + 0.5 * ops.square(leaf).sum()
        return total


class Tutorial(nn.Cell):  # type: ignore[misc]
    """As MindSpore's tutorial describes it: a sum and a zero for each parameter, a counter, and ``if counter % steps == 0``."""

    def __init__(self, optimizer: Any, steps: int) -> None:
        super().__init__(auto_prefix=False)
        self.optimizer = optimizer
        self.steps = steps
        self.sums = ParameterTuple(optimizer.parameters).clone(prefix="sum", init="zeros")
        self.zeros = ParameterTuple(optimizer.parameters).clone(prefix="zero", init="zeros")
        self.counter = Parameter(Tensor(1, ms.int32), name="tutorial_counter")
        self.map = ops.HyperMap()

    def construct(self, gradients: Any) -> Any:
        self.map(ops.partial(ops.assign_add), self.sums, gradients)
        if self.counter % self.steps == 0:
            self.optimizer(self.sums)
            self.map(ops.partial(ops.assign), self.sums, self.zeros)
        ops.assign_add(self.counter, Tensor(1, ms.int32))
        return True


class Step(nn.Cell):  # type: ignore[misc]
    """Forward, backward and whatever takes the gradients; returns the loss."""

    def __init__(self, net: Any, take: Any) -> None:
        super().__init__(auto_prefix=False)
        self.take = take
        self.net = net
        self.weights = ParameterTuple(net.trainable_params())
        self.gradient = ms.value_and_grad(net, None, self.weights)

    def construct(self, scale: Any) -> Any:
        loss, gradients = self.gradient(scale)
        return ops.depend(loss, self.take(gradients))


def cases(quick: bool) -> Iterator[Case]:
    for steps in QUICK_WINDOWS if quick else WINDOWS:
        yield make_case(f"windows of {steps}", steps, steps=steps, tensors=FEW, elements=SMALL, run=RUN)


def make_case(name: str, x: float, *, steps: int, tensors: int, elements: int, run: int) -> Case:
    """`run` micro-batches in windows of `steps`, a divisor of it, over a model of `elements` in equal `tensors`."""
    ms.set_context(mode=ms.GRAPH_MODE)
    nets = {BASELINE: Model(tensors, elements), "gradaccum": Model(tensors, elements)}
    takers = {BASELINE: Tutorial(_adam(nets[BASELINE]), steps), "gradaccum": gradaccum.wrap(_adam(nets["gradaccum"]), steps=steps)}
    contestants = {label: _loop(Step(nets[label], taker), run) for label, taker in takers.items()}
    held = {label: {"bytes held": held_bytes(taker, nets[label])} for label, taker in takers.items()}
    return Case(name, BASELINE, contestants, held, x=x, rates={label: {"micro-batches/s": run} for label in takers})


def held_bytes(taker: Any, net: Any) -> float:
    """Bytes of all Parameters but the model's and Adam's two moments of each; scalars not counted."""
    own = {id(parameter) for parameter in net.trainable_params()}
    found = {id(parameter): parameter.nbytes for parameter in taker.get_parameters() if parameter.size > 1}
    return float(sum(found[key] for key in found.keys() - own) - 2 * sum(parameter.nbytes for parameter in net.trainable_params()))


def _adam(net: Any) -> Any:
    return nn.Adam(net.trainable_params(), learning_rate=1e-4)


def _loop(step: Any, count: int) -> Callable[[], object]:
    scale = Tensor(0.0, ms.float32)

    def loop() -> object:
        for _ in range(count):
            loss = step(scale)
        return loss.asnumpy()

    return loop
