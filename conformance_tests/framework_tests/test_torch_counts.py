"""The cost of a window, counted: operations, passes over the gradients, updates. The
benchmarks measure times.
"""

from __future__ import annotations

import cProfile
import weakref
from typing import Any

import pytest
import torch

import gradaccum

from .torch_operations import Operations

by_kernel = pytest.mark.parametrize("fused", [False, True])
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


def setting(layers: int = 2, fused: bool = False, **options: Any) -> tuple[Any, Any]:
    model = torch.nn.Sequential(*(torch.nn.Linear(SIZE, SIZE) for _ in range(layers)))
    inner = torch.optim.AdamW(model.parameters(), foreach=not fused, fused=fused)
    return model, gradaccum.wrap(inner, steps=STEPS, **options)


def backward(model: torch.nn.Module) -> None:
    model(torch.ones(2, SIZE)).square().sum().backward()


def micro_batches(model: torch.nn.Module, opt: Any, count: int) -> None:
    for _ in range(count):
        backward(model)
        opt.step()
        opt.zero_grad()


@pytest.mark.parametrize("options", [{}, {"clip_norm": 1.0}, {"fused": True}], ids=str)
def test_steps_inside_windows_run_no_operation(options: dict[str, Any]) -> None:
    """Inside a window step() and zero_grad() allocate nothing and read no gradient."""
    model, opt = setting(**options)
    micro_batches(model, opt, STEPS)
    for _ in range(STEPS - 1):
        backward(model)
        with Operations() as ops:
            opt.step()
            opt.zero_grad()
        assert ops.counts == {}
    sums = opt._window.gradient_sum.gradients()
    assert all(total is each.grad for each, total in sums.items()), "no second buffer"


@by_kernel
def test_window_end_makes_two_passes(fused: bool) -> None:
    """One pass takes the norm, and the other pass divides."""
    model, opt = setting(fused=fused)
    micro_batches(model, opt, 2 * STEPS - 1)
    backward(model)
    with Operations() as ours:
        opt.step()
    inner = opt.optimizer
    del opt  # Only then does the inner optimizer step by itself.
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    with Operations() as bare:
        inner.step()
    extra = ours.counts - bare.counts
    assert extra["_foreach_norm"] == 1
    # The divisor is a power of two, by whose inverse a CPU multiplies in half the time.
    assert extra["_foreach_div_"] == 0
    assert extra["_foreach_mul_"] == 1
    assert sum(extra.values()) <= 5, "no other pass over the gradients"
    assert extra["_local_scalar_dense"] <= 1, "one wait for the device"


@pytest.mark.parametrize("layers", [1, 30])
def test_python_calls_stay_few(layers: int) -> None:
    """A step() and a zero_grad() inside a window make as few calls for 60 parameters as
    for two.
    """
    model, opt = setting(layers, clip_norm=1.0)
    micro_batches(model, opt, STEPS)
    for most in (CALLS_AT_BEGIN, CALLS, CALLS):
        backward(model)
        profile = cProfile.Profile(builtins=False)
        profile.enable()
        opt.step()
        opt.zero_grad()
        profile.disable()
        count = sum(entry.callcount for entry in profile.getstats())
        assert 0 < count <= most


@by_kernel
@pytest.mark.parametrize(
    "options", [{}, {"on_overflow": "ignore"}, {"clip_norm": 1e-3}], ids=str
)
def test_a_closed_window_holds_no_gradient(
    options: dict[str, Any], fused: bool
) -> None:
    """Otherwise the memory of the gradients would be there twice while the next window
    is added up.
    """
    model, opt = setting(fused=fused, **options)
    micro_batches(model, opt, STEPS - 1)
    backward(model)
    gradients = [weakref.ref(parameter.grad) for parameter in model.parameters()]
    opt.step()
    opt.zero_grad()
    assert opt.result.applied
    assert not any(gradient() is not None for gradient in gradients)
