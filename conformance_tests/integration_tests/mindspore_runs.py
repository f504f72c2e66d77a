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

ROWS, PART, STEPS = 16, 2, 3
"""Windows of three micro-batches of two rows; the last one holds two."""
START = np.concatenate([WEIGHT.ravel(), BIAS])

Make = Callable[[nn.Cell], Any]


def values(net: nn.Cell) -> Any:
    """The parameters in one array."""
    return np.concatenate([net.weight.asnumpy().ravel(), net.bias.asnumpy()])


def trained(make: Make, wrapped: bool = True, jit: bool = False) -> Any:
    """The parameters after the wrapped optimizer's run, which is flushed, or after the
    bare optimizer's run on the large batches.
    """
    net = make_net()
    optimizer = make(net)
    size = PART * STEPS
    if wrapped:
        size = PART
        optimizer = gradaccum.wrap(optimizer, steps=STEPS)

    def forward(x: Tensor, y: Tensor) -> Tensor:
        return ops.square(net(x) - y).mean()

    backward = ms.grad(forward, None, optimizer.parameters)

    def step(x: Tensor, y: Tensor) -> Tensor:
        return optimizer(backward(x, y))

    call = ms.jit(step) if jit else step
    for first in range(0, ROWS, size):
        end = min(first + size, ROWS)
        call(Tensor(X[first:end]), Tensor(Y[first:end]))
    if wrapped:
        ms.jit(optimizer.flush.construct)() if jit else optimizer.flush()
        assert optimizer.result.optimizer_step == 3
    return values(net)
