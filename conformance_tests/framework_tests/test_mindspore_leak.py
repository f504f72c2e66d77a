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
from conformance_tests.framework_tests.mindspore_common import pynative_after, set_mode  # noqa: F401
from gradaccum_conformance.deep import deep_but

WINDOWS = 200
LEAK = 100
"""Bytes per window; one leaked tensor takes 1200."""


FIELDS = (
    "arena",
    "ordblks",
    "smblks",
    "hblks",
    "hblkhd",
    "usmblks",
    "fsmblks",
    "uordblks",
    "fordblks",
    "keepcost",
)


class Malloc(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in FIELDS]


def held():
    """The bytes that this process has in use."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallinfo2"):
        pytest.skip("needs mallinfo2, of glibc 2.33")
    libc.mallinfo2.restype = Malloc
    malloc = libc.mallinfo2()
    return malloc.uordblks + malloc.hblkhd


class Step(nn.Cell):
    def __init__(self, optimizer):
        super().__init__(auto_prefix=False)
        self.optimizer = optimizer

    def construct(self, *gradients):
        return self.optimizer(gradients)


class TellingStep(Step):
    def construct(self, *gradients):
        return self.optimizer(gradients, 2.0, gradients[0][0, 0])


def two(optimizer_step):
    return 2 + 0 * optimizer_step


CASES = {
    "plain": {},
    "everything": {
        "on_overflow": "drop_micro_batch",
        "loss_scale": gradaccum.DynamicLossScale(8.0, growth_interval=3),
        "clip_norm": 1.0,
        "skip_norm": 1e9,
    },
    "nothing measured": {"on_overflow": "ignore"},
    "sizes from a function": {"steps": two, "on_overflow": "drop_micro_batch"},
    "a scale of its own": {"steps": [(0, 2), (1000, 2)], "clip_norm": 1.0},
}


def cell_of(case):
    parameters = [
        Parameter(Tensor(np.ones((4, 4), np.float32)), name=name) for name in "ab"
    ]
    scale = 8.0 if case == "a scale of its own" else 1.0
    inner = nn.Momentum(parameters, 1e-6, 0.9, loss_scale=scale)
    optimizer = gradaccum.wrap(inner, **{"steps": 2, **CASES[case]})
    optimizer.scale(Tensor(1.0))  # the gradients below are those of a scaled loss
    return (TellingStep if case == "everything" else Step)(optimizer)


@pytest.mark.parametrize("mode", ["jit", "graph"])
@pytest.mark.parametrize("case", deep_but(("plain", "everything"), CASES))
def test_window_keeps_no_memory(case, mode):
    set_mode(mode)
    cell = cell_of(case)
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
