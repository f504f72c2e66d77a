"""Training steps of MindSpore that give the loss back, each written from what people
run today; Python decides when a window ends.

The older tutorial cuts the step in three Cells: forward, backward and addition; update;
clear. It divides the loss by the number of micro-batches and checks nothing.
`checked_cells` is the same loop made right by hand: a mean of the gradients, their
norm, and no update with a NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import mindspore as ms
from mindspore import ParameterTuple, nn, ops

import gradaccum
from benchmarks.contestants.mindspore_peers import (
    STEPS,
    Add,
    Clear,
    Net,
    Update,
    adam,
    buffers,
)
from gradaccum_mindspore import TrainOneStepCell

Contestant = tuple[Callable[[], object], dict[str, float]]


class Trained(nn.Cell):  # type: ignore[misc]
    """Forward, backward and whatever takes the gradients; returns the loss."""

    def __init__(self, net: Net, take: Any) -> None:
        super().__init__(auto_prefix=False)
        self.net, self.take = net, take
        self.backward = ms.value_and_grad(
            net, None, ParameterTuple(net.trainable_params())
        )

    def construct(self, x: Any) -> Any:
        loss, gradients = self.backward(x)
        return ops.depend(loss, self.take(gradients))


class Norm(nn.Cell):  # type: ignore[misc]
    """The global norm of the sums, over the number of micro-batches."""

    def __init__(self, sums: Any) -> None:
        super().__init__(auto_prefix=False)
        self.sums = sums
        self.map = ops.HyperMap()

    def construct(self) -> Any:
        return ops.sqrt(ops.addn(self.map(square_sum, self.sums))) / STEPS


class MeanUpdate(Update):
    """The update with the mean of the micro-batches."""

    def __init__(self, optimizer: Any, sums: Any) -> None:
        super().__init__(optimizer, sums)
        self.map = ops.HyperMap()

    def construct(self) -> Any:
        return self.optimizer(self.map(mean, self.sums))


class CheckedAccumulator(nn.Cell):  # type: ignore[misc]
    """The tutorials' accumulator made right by hand, in one graph: a mean, its norm,
    and no update with a NaN.
    """

    def __init__(self, optimizer: Any) -> None:
        super().__init__(auto_prefix=False)
        self.optimizer = optimizer
        self.sums, self.zeros = sums_of(optimizer)
        self.counter = ms.Parameter(ms.Tensor(1, ms.int32), name="checked_counter")
        self.norm = ms.Parameter(ms.Tensor(0.0, ms.float32), name="checked_norm")
        self.map = ops.HyperMap()

    def construct(self, gradients: Any) -> Any:
        self.map(ops.partial(ops.assign_add), self.sums, gradients)
        if self.counter % STEPS == 0:
            norm = ops.sqrt(ops.addn(self.map(square_sum, self.sums))) / STEPS
            ops.assign(self.norm, norm)
            if ops.isfinite(norm):
                self.optimizer(self.map(mean, self.sums))
            self.map(ops.partial(ops.assign), self.sums, self.zeros)
        ops.assign_add(self.counter, ms.Tensor(1, ms.int32))
        return True


def square_sum(tensor: Any) -> Any:
    return ops.square(tensor).sum()


def mean(tensor: Any) -> Any:
    return tensor / STEPS


def sums_of(optimizer: Any) -> tuple[Any, Any]:
    """A sum and a zero for each parameter."""
    sums, zeros = (
        optimizer.parameters.clone(prefix=prefix, init="zeros")
        for prefix in ("sum", "zero")
    )
    return sums, zeros


def three_cells(width: int, x: Any) -> Contestant:
    """The older tutorial's."""
    net = Net(width, STEPS)
    optimizer = adam(net)
    sums, zeros = sums_of(optimizer)
    update, clear = Update(optimizer, sums), Clear(sums, zeros)

    def end() -> None:
        update()
        clear()

    return window_of(Trained(net, Add(sums)), net, x, end), buffers(
        update, clear, net=net
    )


def checked_cells(width: int, x: Any) -> Contestant:
    """The same made right by hand; Python looks at the norm."""
    net = Net(width)
    optimizer = adam(net)
    sums, zeros = sums_of(optimizer)
    norm, update, clear = Norm(sums), MeanUpdate(optimizer, sums), Clear(sums, zeros)

    def end() -> None:
        if math.isfinite(norm().asnumpy()):
            update()
        clear()

    return window_of(Trained(net, Add(sums)), net, x, end), buffers(
        update, clear, net=net
    )


def in_one_graph(accumulation: Callable[[Any], Any], net: Net, x: Any) -> Contestant:
    """`accumulation` of an Adam takes the gradients inside the one Cell that Python
    calls.
    """
    take = accumulation(adam(net))
    return window_of(Trained(net, take), net, x), buffers(take, net=net)


def training_cell(
    width: int, x: Any, *, weighs: bool = False, **options: Any
) -> Contestant:
    """`gradaccum_mindspore.TrainOneStepCell`; `weighs`: by items, as it does unless
    told that each micro-batch weighs 1.
    """
    net = Net(width)
    optimizer = gradaccum.wrap(adam(net), steps=STEPS, **options)
    cell = (
        TrainOneStepCell(net, optimizer)
        if weighs
        else TrainOneStepCell(net, optimizer, None)
    )
    return window_of(cell, net, x), buffers(optimizer, net=net)


def window_of(
    step: Callable[[Any], object],
    net: Net,
    x: Any,
    end: Callable[[], None] | None = None,
) -> Callable[[], object]:
    """`STEPS` micro-batches, then `end`, then a wait for the parameters."""
    weight = net.trainable_params()[0]

    def window() -> object:
        for _ in range(STEPS):
            step(x)
        if end is not None:
            end()
        return weight.asnumpy()

    return window
