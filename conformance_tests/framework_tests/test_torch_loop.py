"""The wrapped optimizer in the loops that torch's users write."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.optim import SGD
from torch.testing import assert_close

import gradaccum

from .torch_model import (
    MAKERS,
    large_batch_step,
    loss_of,
    make,
    make_model,
    rows_of,
    same,
    train,
    values,
)


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("order", ["zero_grad_first", "zero_grad_last", "no_zero_grad"])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_usual_loop_equals_large_batch(
    name: str, order: str, set_to_none: bool
) -> None:
    model = make_model()
    opt = gradaccum.wrap(MAKERS[name](model.parameters()), steps=4)
    start = values(model)
    for index in range(4):
        if order == "zero_grad_first":
            opt.zero_grad(set_to_none=set_to_none)
        assert same(model, start)
        loss_of(model, rows_of(index)).backward()
        opt.step()
        if order == "zero_grad_last":
            opt.zero_grad(set_to_none=set_to_none)
    assert opt.result.applied
    for p, expected in zip(
        model.parameters(), large_batch_step(MAKERS[name]), strict=True
    ):
        assert_close(p.detach(), expected, rtol=1e-5, atol=1e-5)
        if order == "zero_grad_last" and not set_to_none:
            assert torch.equal(p.grad, torch.zeros_like(p))
        else:
            assert p.grad is None


def test_wrapper_shares_groups_and_state() -> None:
    _, opt = make()
    inner = opt.optimizer
    inner.tag = "x"
    assert isinstance(opt, torch.optim.Optimizer)
    assert opt.tag == "x"
    assert opt.param_groups is inner.param_groups
    assert opt.state is inner.state
    assert opt.defaults is inner.defaults


class Noting(SGD):
    def step(self, closure: Any = None, **kwargs: Any) -> None:
        self.seen.append(kwargs)


def test_hooks_fire_once_per_update() -> None:
    """The inner step and the post-hooks get the arguments that a pre-hook returns."""
    model, opt = make(steps=2, inner=lambda ps: Noting(ps, lr=0.5))
    opt.optimizer.seen = []
    opt.register_step_pre_hook(lambda o, args, kwargs: (args, {"extra": o}))
    opt.register_step_post_hook(lambda o, args, kwargs: o.seen.append(kwargs))
    train(model, opt, 4)
    assert opt.seen == [{"extra": opt}] * 4


def test_group_added_in_mid_window_counts() -> None:
    model = make_model()
    opt = gradaccum.wrap(SGD(model[2].parameters(), lr=0.5), steps=2)
    loss_of(model, rows_of(0)).backward()
    opt.step()
    model[0].zero_grad()
    opt.add_param_group({"params": list(model[0].parameters()), "lr": 0.25})
    loss_of(model, rows_of(1)).backward()
    expected = [p - 0.25 * p.grad / 2 for p in model[0].parameters()]
    opt.step()
    assert_close(list(model[0].parameters()), expected)


def test_parameter_may_be_frozen_for_a_window() -> None:
    model, opt = make(steps=2)
    for window in range(4):
        model[0].weight.requires_grad_(window != 1)
        train(model, opt, 2)
    assert opt.result.optimizer_step == 4


@pytest.mark.parametrize("is_under_way", [False, True])
def test_half_precision_added_in_mid_window_is_summed_in_float32(
    is_under_way: bool,
) -> None:
    """In bfloat16 each small gradient would vanish beside the first one."""
    early = torch.zeros(2, requires_grad=True)
    late = torch.zeros(2, dtype=torch.bfloat16, requires_grad=True)
    inner = SGD([early], lr=1.0)
    opt = gradaccum.wrap(inner, steps=6, reduction="sum")
    for index, factor in enumerate([0.0, 1.0, *[2.0**-9] * 4]):
        opt.backward(early.sum() * 3 + (late * factor).sum())
        if index == 0:
            late.grad = None
        if index == is_under_way:
            if not is_under_way:
                opt.step()
            opt.add_param_group({"params": [late]})
            if not is_under_way:
                continue
        opt.step()
    assert opt.result.applied
    assert early.tolist() == [-18.0] * 2
    assert late.tolist() == [-1 - 2**-7] * 2


@pytest.mark.parametrize("clips", [False, True])
def test_half_precision_group_joins_a_micro_batch(clips: bool) -> None:
    """The group moves the sum out of ``.grad``, with the last gradient in it."""
    early = torch.zeros(2, requires_grad=True)
    late = torch.zeros(2, dtype=torch.bfloat16, requires_grad=True)
    opt = gradaccum.wrap(SGD([early], lr=1.0), steps=6)
    opt.backward(early.sum() * 3)
    opt.step()
    early.sum().backward()
    if clips:
        torch.nn.utils.clip_grad_norm_([early], 1e-3)
    opt.add_param_group({"params": [late]})
    with pytest.raises(gradaccum.UsageError, match="flush"):
        opt.flush()
    if clips:
        with pytest.raises(gradaccum.UsageError, match=r"\.grad: expected"):
            opt.step()
        return
    opt.step()
    opt.flush()
    assert early.tolist() == [-2.0] * 2


# Closures.


def test_closure_runs_once_per_micro_batch() -> None:
    """By default too: Lightning hands one over in each step. One that raises counts
    nothing.
    """
    model, opt = make(clip_norm=1e3)
    losses = []
    with pytest.raises(ZeroDivisionError):
        opt.step(lambda: 1 / 0)
    assert opt.result.micro_step == 0

    def closure():
        opt.zero_grad()
        loss = loss_of(model, rows_of(len(losses)))
        loss.backward()
        losses.append(loss.item())
        return loss

    with torch.no_grad():
        for index in range(4):
            assert opt.step(closure).item() == losses[index]
    assert_close(values(model), large_batch_step(MAKERS["sgd"]))
