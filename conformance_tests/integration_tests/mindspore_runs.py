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
from conformance_tests.framework_tests.mindspore_common import (
    BIAS,
    WEIGHT,
    X,
    Y,
    make_net,
)

WINDOWS = ((0, 6), (6, 12), (12, 16))
"""Rows of each window: two of three micro-batches, and one of two."""
PART, STEPS = 2, 3
START = np.concatenate([WEIGHT.ravel(), BIAS])

Make = Callable[[nn.Cell], Any]


def values(net: nn.Cell) -> Any:
    """The parameters in one array."""
    return np.concatenate([net.weight.asnumpy().ravel(), net.bias.asnumpy()])


def stepping(
    net: nn.Cell, optimizer: Any, jit: bool = False
) -> Callable[[int, int], Any]:
    """A training step with these rows."""

    def forward(x: Tensor, y: Tensor) -> Tensor:
        return ops.square(net(x) - y).mean()

    backward = ms.grad(forward, None, optimizer.parameters)

    def step(x: Tensor, y: Tensor) -> Tensor:
        return optimizer(backward(x, y))

    call = ms.jit(step) if jit else step
    return lambda first, end: call(Tensor(X[first:end]), Tensor(Y[first:end]))


def large(make: Make) -> Any:
    """The parameters after the bare optimizer's run on the large batches."""
    net = make_net()
    step = stepping(net, make(net))
    for first, end in WINDOWS:
        step(first, end)
    return values(net)


def accumulated(make: Make, jit: bool = False) -> Any:
    """The parameters after the wrapped optimizer's run; the last window is flushed."""
    net = make_net()
    opt = gradaccum.wrap(make(net), steps=STEPS)
    step = stepping(net, opt, jit)
    for first in range(0, 16, PART):
        step(first, first + PART)
    ms.jit(opt.flush.construct)() if jit else opt.flush()
    assert opt.result.optimizer_step == len(WINDOWS)
    return values(net)


def assert_equals_large_batches(make: Make) -> None:
    """Within 1e-6 of the bare optimizer on the large batches, which moves the
    parameters.
    """
    wanted = large(make)
    assert np.abs(wanted - START).max() > 1e-5
    np.testing.assert_allclose(accumulated(make), wanted, rtol=1e-6, atol=1e-6)
