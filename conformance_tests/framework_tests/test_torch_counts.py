"""The cost of a window, counted: operations, passes over the gradients, updates. The
benchmarks measure times.
"""

from __future__ import annotations

import math
import sys
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

import gradaccum
from conformance_tests.framework_tests.torch_operations import Operations
from gradaccum_torch.arithmetic import divide

STEPS = 4
SIZE = 64
"""The side of the square weights and the length of the biases. A norm is taken of each
of so few small tensors.
"""
CALLS = 40
"""Python calls of a step() and a zero_grad() inside a window. Each takes a microsecond,
since the backward pass has filled the caches.
"""

CALLS_AT_BEGIN = 56
"""The same where a window begins: the step looks up the size, checks that the
parameters are still the planned ones and notes a few of their numbers.
"""


def setting(**options: Any) -> tuple[torch.nn.Module, torch.optim.Optimizer, Any]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(SIZE, SIZE), torch.nn.Linear(SIZE, SIZE)
    )
    fused = options.pop("fused", False)
    inner = torch.optim.AdamW(model.parameters(), foreach=not fused, fused=fused)
    return model, inner, gradaccum.wrap(inner, steps=STEPS, **options)


def python_calls(run: Callable[[], None]) -> list[str]:
    """The Python functions that `run` calls, without `run` itself."""
    called: list[str] = []
    sys.setprofile(
        lambda frame, event, _: (
            called.append(frame.f_code.co_name) if event == "call" else None
        )
    )
    try:
        run()
    finally:
        sys.setprofile(None)
    return called[1:]


def backward(model: torch.nn.Module) -> None:
    model(torch.ones(2, SIZE)).square().sum().backward()


def window(model: torch.nn.Module, opt: Any) -> None:
    for _ in range(STEPS):
        backward(model)
        opt.step()
        opt.zero_grad()


@pytest.mark.parametrize("options", [{}, {"clip_norm": 1.0}, {"fused": True}], ids=str)
def test_steps_inside_windows_run_no_operation(options: dict[str, Any]) -> None:
    """Inside a window step() and zero_grad() allocate nothing and read no gradient.
    Only the first window compares values, and the first step keeps a few numbers of
    two parameters.
    """
    model, _, opt = setting(**options)
    window(model, opt)
    for index in range(STEPS - 1):
        backward(model)
        with Operations() as ops:
            opt.step()
            opt.zero_grad()
        assert ops.counts == ({} if index else {"clone": 2})


@pytest.mark.parametrize("fused", [False, True])
def test_window_end_makes_two_passes(fused: bool) -> None:
    """One pass takes the norm, the other one divides. A fused kernel divides by itself,
    so that only the first is left.
    """
    model, inner, opt = setting(fused=fused)
    for _ in range(2 * STEPS - 1):
        backward(model)
        opt.step()
    backward(model)
    with Operations() as ours:
        opt.step()
    del opt  # Only then does the inner optimizer step by itself.
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    with Operations() as bare:
        inner.step()
    extra = ours.counts - bare.counts
    assert extra["_foreach_norm"] == 1
    # The divisor is a power of two, by whose inverse a CPU multiplies in half the time.
    assert (extra["_foreach_div_"], extra["_foreach_mul_"]) == (0, 1)
    small = {
        "stack",
        "linalg_vector_norm",
        "_local_scalar_dense",
        "lift_fresh",
        "full",
        "cat",
        "view",
    }
    assert set(extra) <= {"_foreach_norm", "_foreach_mul_"} | small, (
        "no other pass over the gradients"
    )
    assert sum(extra.values()) <= 5, extra
    # One wait for the device. The fused optimizer also rounds its divisor, which is on
    # the host.
    assert extra["_local_scalar_dense"] <= (2 if fused else 1)


@pytest.mark.parametrize("layers", [1, 30])
@pytest.mark.parametrize("options", [{}, {"clip_norm": 1.0}], ids=str)
def test_python_calls_stay_few(layers: int, options: dict[str, Any]) -> None:
    """A step() and a zero_grad() inside a window make as few calls for 60 parameters as
    for two.
    """
    model = torch.nn.Sequential(*(torch.nn.Linear(SIZE, SIZE) for _ in range(layers)))
    opt = gradaccum.wrap(torch.optim.AdamW(model.parameters()), steps=STEPS, **options)

    def step() -> None:
        opt.step()
        opt.zero_grad()

    window(model, opt)
    for first in (True, False, False):
        backward(model)
        called = python_calls(step)
        assert len(called) <= (CALLS_AT_BEGIN if first else CALLS), called


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(
    "options", [{}, {"on_overflow": "ignore"}, {"clip_norm": 1e-3}], ids=str
)
def test_a_closed_window_holds_no_gradient(
    options: dict[str, Any], fused: bool
) -> None:
    """Otherwise the memory of the gradients would be there twice while the next window
    is added up.
    """
    model, _, opt = setting(fused=fused, **options)
    for _ in range(STEPS):
        backward(model)
        gradients = [weakref.ref(parameter.grad) for parameter in model.parameters()]
        opt.step()
        opt.zero_grad()
    assert opt.result.applied
    assert not any(gradient() is not None for gradient in gradients)


@pytest.mark.parametrize(
    "divisor", [2.0**-126, 0.5, 8.0, 2.0**126, 2.0**127, 2.0**-127, 3.0, 7e-3], ids=str
)
def test_division_has_the_bits_of_a_division(divisor: float) -> None:
    """Also where it multiplies by the inverse, and where numbers become subnormal."""
    tiny = torch.finfo(torch.float32).tiny
    values = torch.cat(
        [
            torch.randn(1000),
            torch.randn(1000) * tiny,
            torch.tensor([0.0, -0.0, math.inf, math.nan, 3.4e38]),
        ]
    )
    expected = values / torch.tensor(divisor)
    divide([values], divisor)
    assert torch.equal(values.view(torch.int32), expected.view(torch.int32))


def test_gradients_are_the_only_sums() -> None:
    """float32 sums live in ``.grad``. The wrapper and its window hold no other tensor
    of a parameter's size.
    """
    model, _, opt = setting()
    backward(model)
    opt.step()
    sums = opt._window.gradient_sum.gradients().values()
    assert [total.data_ptr() for total in sums] == [
        p.grad.data_ptr() for p in model.parameters()
    ]
