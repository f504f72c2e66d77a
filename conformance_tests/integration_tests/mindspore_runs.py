"""A linear regression trained by any optimizer of MindSpore: bare on the large batches,
and wrapped on their micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

import gradaccum

WINDOWS = ((0, 6), (6, 12), (12, 16))
"""Rows of each window: two of three micro-batches, and one of two."""
PART, STEPS = 2, 3

RNG = np.random.RandomState(0)
X, Y = RNG.randn(16, 4).astype(np.float32), RNG.randn(16, 2).astype(np.float32)
WEIGHT, BIAS = RNG.randn(2, 4).astype(np.float32), RNG.randn(2).astype(np.float32)
START = np.concatenate([WEIGHT.ravel(), BIAS])

Make = Callable[[nn.Cell], Any]


def make_net() -> nn.Cell:
    """A layer that begins from `START`."""
    net = nn.Dense(4, 2)
    ops.assign(net.weight, Tensor(WEIGHT))
    ops.assign(net.bias, Tensor(BIAS))
    return net


def values(net: nn.Cell) -> Any:
    """The parameters in one array."""
    return np.concatenate([net.weight.asnumpy().ravel(), net.bias.asnumpy()])


def stepping(
    net: nn.Cell, optimizer: Any, jit: bool = False
) -> Callable[[Tensor, Tensor], Tensor]:
    """A training step."""

    def forward(x: Tensor, y: Tensor) -> Tensor:
        return ops.square(net(x) - y).mean()

    backward = ms.value_and_grad(forward, None, optimizer.parameters)

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss, gradients = backward(x, y)
        optimizer(gradients)
        return loss

    return ms.jit(step) if jit else step


def large(make: Make) -> Any:
    """The parameters after the bare optimizer's run on the large batches."""
    net = make_net()
    step = stepping(net, make(net))
    for first, end in WINDOWS:
        step(Tensor(X[first:end]), Tensor(Y[first:end]))
    return values(net)


def accumulated(make: Make, jit: bool = False, **options: Any) -> Any:
    """The parameters after the wrapped optimizer's run; the last window is flushed."""
    net = make_net()
    opt = gradaccum.wrap(make(net), steps=STEPS, **options)
    step = stepping(net, opt, jit)
    for first in range(0, len(X), PART):
        step(Tensor(X[first : first + PART]), Tensor(Y[first : first + PART]))
    ms.jit(opt.flush.construct)() if jit else opt.flush()
    assert opt.result.optimizer_step == len(WINDOWS)
    return values(net)


def assert_equals_large_batches(make: Make) -> None:
    """Within 1e-6 of the bare optimizer on the large batches, which moves the
    parameters.
    """
    wanted = large(make)
    assert np.abs(wanted - START).max() > 1e-5, (
        "the comparison would pass without an update"
    )
    np.testing.assert_allclose(accumulated(make), wanted, rtol=1e-6, atol=1e-6)
