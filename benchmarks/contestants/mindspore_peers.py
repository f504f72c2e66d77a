"""MindSpore's usual ways to accumulate gradients, each written from its public
description.

All of them are Cells that take the gradients of one micro-batch, as gradaccum's wrapped
optimizer is, but for the three cells, which Python calls in turn. The tutorials divide
the loss by the number of micro-batches where gradaccum divides the sum, and measure no
norm: a scalar operation for them, two passes over the gradients for gradaccum.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

os.environ.setdefault("GLOG_v", "3")

import mindspore as ms
from mindspore import Parameter, ParameterTuple, Tensor, boost, nn, ops

STEPS = 8


class Net(nn.Cell):  # type: ignore[misc]
    """Square layers and a scalar loss, divided by `share`."""

    def __init__(self, width: int, share: int = 1) -> None:
        super().__init__()
        self.layers = nn.SequentialCell([_dense(width) for _ in range(4)])
        self.share = share

    def construct(self, x: Any) -> Any:
        return ops.square(self.layers(x)).mean() / self.share


class Gradient(nn.Cell):  # type: ignore[misc]
    """Forward and backward alone."""

    def __init__(self, net: Net) -> None:
        super().__init__(auto_prefix=False)
        self.net = net
        self.weights = ParameterTuple(net.trainable_params())
        self.gradient = ops.GradOperation(get_by_list=True)

    def construct(self, x: Any) -> Any:
        return self.gradient(self.net, self.weights)(x)


class TrainStep(Gradient):
    """Forward, backward and whatever takes the gradients."""

    def __init__(self, net: Net, take: Any) -> None:
        super().__init__(net)
        self.take = take

    def construct(self, x: Any) -> Any:
        return self.take(self.gradient(self.net, self.weights)(x))


class TutorialAccumulator(nn.Cell):  # type: ignore[misc]
    """As MindSpore's tutorial describes it: a sum and a zero for each parameter, a
    counter, and ``if counter % steps == 0``.
    """

    def __init__(self, optimizer: Any, steps: int = STEPS) -> None:
        super().__init__(auto_prefix=False)
        self.optimizer = optimizer
        self.steps = steps
        self.sums = optimizer.parameters.clone(prefix="sum", init="zeros")
        self.zeros = optimizer.parameters.clone(prefix="zero", init="zeros")
        self.counter = Parameter(Tensor(1, ms.int32), name="tutorial_counter")
        self.map = ops.HyperMap()

    def construct(self, gradients: Any) -> Any:
        self.map(ops.partial(ops.assign_add), self.sums, gradients)
        if self.counter % self.steps == 0:
            self.optimizer(self.sums)
            self.map(ops.partial(ops.assign), self.sums, self.zeros)
        ops.assign_add(self.counter, Tensor(1, ms.int32))
        return True


class Add(nn.Cell):  # type: ignore[misc]
    """The first of the three cells takes the gradients; `Update` and `Clear` are the
    others.
    """

    def __init__(self, sums: Any) -> None:
        super().__init__(auto_prefix=False)
        self.sums = sums
        self.map = ops.HyperMap()

    def construct(self, gradients: Any) -> Any:
        return self.map(ops.partial(ops.assign_add), self.sums, gradients)


class Update(nn.Cell):  # type: ignore[misc]
    def __init__(self, optimizer: Any, sums: Any) -> None:
        super().__init__(auto_prefix=False)
        self.optimizer, self.sums = optimizer, sums

    def construct(self) -> Any:
        return self.optimizer(self.sums)


class Clear(nn.Cell):  # type: ignore[misc]
    def __init__(self, sums: Any, zeros: Any) -> None:
        super().__init__(auto_prefix=False)
        self.sums, self.zeros = sums, zeros
        self.map = ops.HyperMap()

    def construct(self) -> Any:
        return self.map(ops.partial(ops.assign), self.sums, self.zeros)


class Boost(nn.Cell):  # type: ignore[misc]
    """`mindspore.boost.GradientAccumulation`: takes the loss along with the gradients,
    divides each of them and clears by constants.
    """

    def __init__(self, optimizer: Any) -> None:
        super().__init__(auto_prefix=False)
        self.accumulation = boost.GradientAccumulation(STEPS, optimizer)
        self.loss = Tensor(0.0, ms.float32)

    def construct(self, gradients: Any) -> Any:
        return self.accumulation(self.loss, gradients)


def adam(net: Net) -> Any:
    """The optimizer of every contestant."""
    return nn.Adam(net.trainable_params(), learning_rate=1e-4)


def batch(items: int, width: int) -> Any:
    """A micro-batch, the same for all."""
    return ops.sin(ms.numpy.arange(items * width, dtype=ms.float32)).reshape(
        items, width
    )


def window_of(
    step: Callable[[Any], object], net: Net, x: Any, *after: Callable[[], object]
) -> Callable[[], object]:
    """`STEPS` micro-batches, then `after`, then a wait for the parameters."""
    weight = net.trainable_params()[0]

    def window() -> object:
        for _ in range(STEPS):
            step(x)
        for call in after:
            call()
        return weight.asnumpy()

    return window


def buffers(*holders: Any, net: Net) -> dict[str, float]:
    """Parameters of the model's size beside the model and Adam's two moments, in units
    of the model's size.
    """
    size = sum(p.size for p in net.trainable_params())
    own = {id(p) for p in net.trainable_params()}
    total = sum(
        p.size
        for p in {id(p): p for cell in holders for p in cell.get_parameters()}.values()
        if id(p) not in own
    )
    return {"buffers of the model's size": round(total / size - 2, 2)}


def _dense(width: int) -> Any:
    layer = nn.Dense(width, width, bias_init="zeros")
    ops.assign(layer.weight, batch(width, width) / width**0.5)
    return layer
