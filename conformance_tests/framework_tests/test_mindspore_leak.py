"""Compiled windows keep no host memory: the bytes that `malloc` holds are counted over
some hundred windows.

MindSpore's runtime never frees a value that one conditional branch hands to another if
the branch runs again after an odd number of calls.
"""

import ctypes

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn

import gradaccum

from .mindspore_common import pynative_after, set_mode  # noqa: F401

WINDOWS = 200
LEAK = 100
"""Bytes per window; one leaked tensor takes 1200."""


class Malloc(ctypes.Structure):
    """What ``mallinfo2`` returns. The fifth number is the bytes in mapped blocks, and
    the eighth the other bytes in use.
    """

    _fields_ = [("numbers", ctypes.c_size_t * 10)]


def held():
    """The bytes that this process has in use."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallinfo2"):
        pytest.skip("needs mallinfo2, of glibc 2.33")
    libc.mallinfo2.restype = Malloc
    numbers = libc.mallinfo2().numbers
    return numbers[4] + numbers[7]


class Step(nn.Cell):
    def __init__(self, optimizer):
        super().__init__(auto_prefix=False)
        self.optimizer = optimizer

    def construct(self, *gradients):
        return self.optimizer(gradients, 2.0, gradients[0][0, 0])


OPTIONS = {
    "on_overflow": "drop_micro_batch",
    "loss_scale": gradaccum.DynamicLossScale(8.0, growth_interval=3),
    "clip_norm": 1.0,
    "skip_norm": 1e9,
}


@pytest.mark.parametrize("mode", ["jit", "graph"])
@pytest.mark.parametrize("options", [{}, OPTIONS], ids=["plain", "everything"])
def test_window_keeps_no_memory(options, mode):
    set_mode(mode)
    parameters = [
        Parameter(Tensor(np.ones((4, 4), np.float32)), name=name) for name in "ab"
    ]
    inner = nn.Momentum(parameters, 1e-6, 0.9)
    optimizer = gradaccum.wrap(inner, steps=2, **options)
    optimizer.scale(Tensor(1.0))  # the gradients below are those of a scaled loss
    cell = Step(optimizer)
    step = cell if mode == "graph" else ms.jit(cell.construct)
    finite, infinite = (
        [Tensor(np.full((4, 4), value, np.float32)) for _ in range(2)]
        for value in (1.0, np.inf)
    )
    for window in range(-20, WINDOWS):
        if window == 0:
            before = held()
        for _ in range(2):
            step(*(infinite if window % 7 == 3 else finite))
    assert (held() - before) / WINDOWS < LEAK
