"""``on_overflow="ignore"``: nothing looks at the gradients, wherever the sum lives; what is there is applied."""

from __future__ import annotations

import math
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs PyTorch")

import torch

import gradaccum
from conformance_tests.framework_tests.torch_operations import Operations

WAYS: dict[str, dict[str, Any]] = {
    "in .grad": {},
    "fused": {"fused": True},
    "separate": {"separate_sums": True},
    "float32 sums of bfloat16": {"dtype": torch.bfloat16},
    "masters": {"dtype": torch.bfloat16, "master_weights": True},
    "loss scale": {"loss_scale": 8.0},
    "sum": {"reduction": "sum"},
}
LOOKS = {"linalg_vector_norm", "_foreach_norm", "isfinite", "isnan", "isinf", "_amp_foreach_non_finite_check_and_unscale_", "amax"}


def setting(fused: bool = False, dtype: torch.dtype = torch.float32, **options: Any) -> tuple[torch.nn.Parameter, Any]:
    parameter = torch.nn.Parameter(torch.arange(1.0, 9.0).to(dtype))
    inner = torch.optim.SGD([parameter], lr=0.5, fused=fused)
    return parameter, gradaccum.wrap(inner, **{"steps": 2, "on_overflow": "ignore", **options})


def window(parameter: torch.nn.Parameter, opt: Any, factors: tuple[float, ...] = (1.0, 3.0)) -> None:
    for factor in factors:
        opt.backward((parameter * factor).sum())
        opt.step()
        opt.zero_grad()


@pytest.mark.parametrize("way", WAYS)
def test_a_window_is_as_always_and_looks_at_nothing(way: str) -> None:
    (ours, opt), (theirs, other) = setting(**WAYS[way]), setting(**WAYS[way], on_overflow="skip_window")
    for each, optimizer in ((ours, opt), (theirs, other)):
        window(each, optimizer)
        optimizer.backward(each.sum())
        optimizer.step()
        optimizer.backward(each.sum())
    with Operations() as ops:
        opt.step()
    other.step()
    assert not LOOKS.intersection(ops.names), ops.names
    assert torch.equal(ours, theirs)
    assert (opt.result.applied, opt.result.optimizer_step, math.isnan(opt.result.grad_norm)) == (True, 2, True)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_bad_gradient_reaches_its_own_elements_only(way: str, bad: float) -> None:
    ours, opt = setting(**WAYS[way])
    clean, other = setting(**WAYS[way])
    factors = torch.ones(8)
    factors[3] = bad
    for each, optimizer, second in ((ours, opt, factors), (clean, other, torch.ones(8))):
        optimizer.backward(each.sum())
        optimizer.step()
        optimizer.backward((each * second).sum())
        optimizer.step()
    assert (opt.result.applied, opt.result.skipped, opt.result.overflow) == (True, False, False)
    rest = torch.arange(8) != 3
    assert torch.equal(ours[rest], clean[rest])
    assert not ours[3].isfinite()


def test_masters_take_the_model_over() -> None:
    """Something wrote into the model between two windows: a checkpoint, or averaged weights."""
    for device_waits in (True, False):
        parameter, opt = setting(dtype=torch.bfloat16, master_weights=True)
        window(parameter, opt)
        with torch.no_grad():
            parameter[0] = 64.0
        if not device_waits:  # As on an accelerator, where nothing is asked.
            opt._parameters.may_have_strayed = lambda: True
        before = opt.master_weights[0].clone()
        window(parameter, opt)
        expected = torch.cat([torch.tensor([64.0]), before[1:]]) - 0.5 * 2
        assert torch.equal(opt.master_weights[0], expected)


def test_clearing_to_zeros_goes_on() -> None:
    parameter, opt = setting()
    for _ in range(2):
        opt.backward(parameter.sum())
        opt.step()
    opt.zero_grad(set_to_none=False)
    assert parameter.grad is not None
    assert not parameter.grad.any()


@pytest.mark.parametrize("scale", [2.0, "scaler", "dynamic"])
def test_moving_loss_scales_are_refused(scale: Any) -> None:
    """Nothing would tell them of an overflow."""
    given = {"scaler": lambda: torch.amp.GradScaler("cpu"), "dynamic": gradaccum.DynamicLossScale}.get(scale, lambda: scale)()
    if scale == 2.0:
        setting(loss_scale=given)
        return
    with pytest.raises(gradaccum.ArgumentValueError, match="loss_scale"):
        setting(loss_scale=given)
