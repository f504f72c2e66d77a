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


class Keeping(nn.Cell):
    """A branch that hands a number to an inner branch, which leaks it."""

    def __init__(self, parameters):
        super().__init__(auto_prefix=False)
        self.count = Parameter(Tensor(0, ms.int32), name="count", requires_grad=False)
        self.parameter = parameters[0]

    def construct(self, *gradients):
        count = self.count.value() + 1
        full = count >= 2
        ms.ops.assign(self.count, count)
        if full:
            if ms.ops.isfinite(self.parameter.value().sum()):
                ms.ops.assign(self.parameter, gradients[0])
            ms.ops.assign(self.count, 0 * count)
        return full


def wrapped(parameters):
    return Step(gradaccum.wrap(nn.Momentum(parameters, 1e-6, 0.9), steps=2))


def with_everything(parameters):
    scale = gradaccum.DynamicLossScale(8.0, growth_interval=3)
    options = {
        "on_overflow": "drop_micro_batch",
        "loss_scale": scale,
        "clip_norm": 1.0,
        "skip_norm": 1e9,
    }
    optimizer = gradaccum.wrap(nn.Momentum(parameters, 1e-6, 0.9), steps=2, **options)
    optimizer.scale(Tensor(1.0))  # the gradients below are those of a scaled loss
    return TellingStep(optimizer)


def that_measures_nothing(parameters):
    return Step(
        gradaccum.wrap(
            nn.Momentum(parameters, 1e-6, 0.9), steps=2, on_overflow="ignore"
        )
    )


def two(optimizer_step):
    return 2 + 0 * optimizer_step


def of_sizes_from_a_function(parameters):
    return Step(
        gradaccum.wrap(
            nn.Momentum(parameters, 1e-6, 0.9),
            steps=two,
            on_overflow="drop_micro_batch",
        )
    )


def with_a_scale_of_its_own(parameters):
    return Step(
        gradaccum.wrap(
            nn.Momentum(parameters, 1e-6, 0.9, loss_scale=8.0),
            steps=[(0, 2), (1000, 2)],
            clip_norm=1.0,
        )
    )


def kept_per_window(cell, mode):
    set_mode(mode)
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
    return (held() - before) / WINDOWS


def two_parameters():
    return [Parameter(Tensor(np.ones((4, 4), np.float32)), name=name) for name in "ab"]


MAKERS = (
    wrapped,
    with_everything,
    that_measures_nothing,
    of_sizes_from_a_function,
    with_a_scale_of_its_own,
)


@pytest.mark.parametrize("mode", ["jit", "graph"])
@pytest.mark.parametrize("make", deep_but((wrapped, with_everything), MAKERS))
def test_window_keeps_no_memory(make, mode):
    assert kept_per_window(make(two_parameters()), mode) < LEAK


def test_leak_is_seen():
    """If this test fails, MindSpore's runtime no longer leaks, and
    `gradaccum_mindspore.window.compiled.Notes` can go.
    """
    assert kept_per_window(Keeping(two_parameters()), "jit") > LEAK
