"""The wrapped optimizer in the loops that torch's users write."""

from __future__ import annotations

import weakref

import pytest

pytest.importorskip("torch", reason="needs PyTorch")

import torch
from torch import nn

import gradaccum
from conformance_tests.framework_tests.torch_model import MAKERS, large_batch_step, loss_of, make_model, rows_of
from gradaccum_torch import AccumulatingOptimizer


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("order", ["zero_grad_first", "zero_grad_last", "no_zero_grad"])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_usual_loop_equals_large_batch(name: str, order: str, set_to_none: bool) -> None:
    model = make_model()
    opt = gradaccum.wrap(MAKERS[name](model.parameters()), steps=4)
    start = [p.detach().clone() for p in model.parameters()]
    for index in range(4):
        if order == "zero_grad_first":
            opt.zero_grad(set_to_none=set_to_none)
        assert all(torch.equal(p, q) for p, q in zip(model.parameters(), start, strict=True))
        loss_of(model, rows_of(index)).backward()
        opt.step()
        if order == "zero_grad_last":
            opt.zero_grad(set_to_none=set_to_none)
    assert opt.result.applied
    for p, expected in zip(model.parameters(), large_batch_step(MAKERS[name]), strict=True):
        torch.testing.assert_close(p.detach(), expected, rtol=1e-5, atol=1e-5)
        if order == "zero_grad_last" and not set_to_none:
            assert torch.equal(p.grad, torch.zeros_like(p))
        else:
            assert p.grad is None


def test_wrapper_shares_groups_and_state() -> None:
    inner = torch.optim.AdamW(make_model().parameters(), lr=0.1)
    opt = gradaccum.wrap(inner, steps=2)
    assert isinstance(opt, torch.optim.Optimizer)
    assert opt.param_groups is inner.param_groups
    assert opt.state is inner.state
    assert opt.defaults is inner.defaults
    opt.param_groups[0]["lr"] = 0.25
    assert inner.param_groups[0]["lr"] == 0.25
    inner.load_state_dict(inner.state_dict())
    assert opt.param_groups is inner.param_groups
    assert "AdamW" in repr(opt)
    assert "steps=2" in repr(opt)


def test_inner_attributes_are_readable() -> None:
    inner = torch.optim.SGD(make_model().parameters(), lr=0.1)
    inner.tag = "x"  # type: ignore[attr-defined]
    opt = gradaccum.wrap(inner, steps=2)
    assert opt.tag == "x"
    assert opt.optimizer is inner
    with pytest.raises(AttributeError):
        _ = opt.nothing_of_that_name


def test_hooks_fire_once_per_update() -> None:
    model = make_model()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    opt = gradaccum.wrap(inner, steps=2)
    seen: list[str] = []
    opt.register_step_pre_hook(lambda o, a, k: seen.append("pre" if o is opt else "wrong"))
    opt.register_step_post_hook(lambda o, a, k: seen.append("post" if o is opt else "wrong"))
    inner.register_step_pre_hook(lambda o, a, k: seen.append("inner pre" if o is inner else "wrong"))
    for index in range(4):
        loss_of(model, rows_of(index)).backward()
        opt.step()
    assert seen == ["pre", "inner pre", "post"] * 2


def test_pre_hook_may_return_arguments() -> None:
    """The inner step and the post-hooks get these arguments. Torch refuses any other value."""
    model, seen = make_model(), []

    class Noting(torch.optim.SGD):
        def step(self, closure=None, **kwargs):
            seen.append(kwargs)

    opt = gradaccum.wrap(Noting(model.parameters(), lr=0.5), steps=1)
    handle = opt.register_step_pre_hook(lambda o, args, kwargs: (args, {**kwargs, "extra": 1}))
    opt.register_step_post_hook(lambda o, args, kwargs: seen.append(kwargs))
    loss_of(model).backward()
    opt.step()
    assert seen == [{"extra": 1}, {"extra": 1}]
    handle.remove()
    opt.register_step_pre_hook(lambda o, args, kwargs: 7)
    loss_of(model).backward()
    with pytest.raises(gradaccum.UsageError, match="pre-hook"):
        opt.step()
    assert opt.result.micro_step == 1


def test_pre_hook_may_change_the_gradient() -> None:
    model = make_model()
    opt = gradaccum.wrap(torch.optim.SGD(model.parameters(), lr=0.1), steps=2)
    opt.register_step_pre_hook(lambda o, a, k: nn.utils.clip_grad_value_(model.parameters(), 0.0))
    before = [p.detach().clone() for p in model.parameters()]
    for index in range(2):
        loss_of(model, rows_of(index)).backward()
        opt.step()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


def test_group_added_in_mid_window_counts() -> None:
    model = make_model()
    first, last = model[0], model[2]
    opt = gradaccum.wrap(torch.optim.SGD(last.parameters(), lr=0.5), steps=2)
    loss_of(model, rows_of(0)).backward()
    opt.step()
    for p in first.parameters():
        p.grad = None
    opt.add_param_group({"params": list(first.parameters()), "lr": 0.25})
    loss_of(model, rows_of(1)).backward()
    expected = [p.grad.clone() / 2 for p in first.parameters()]
    before = [p.detach().clone() for p in first.parameters()]
    opt.step()
    for p, q, g in zip(first.parameters(), before, expected, strict=True):
        torch.testing.assert_close(p.detach(), q - 0.25 * g)


def test_layers_freeze_and_unfreeze_between_windows() -> None:
    model = make_model()
    model[0].requires_grad_(False)
    opt = gradaccum.wrap(torch.optim.SGD(model.parameters(), lr=0.5), steps=2)
    before = [p.detach().clone() for p in model[0].parameters()]
    for index in range(4):
        if index == 2:
            assert all(torch.equal(p, q) for p, q in zip(model[0].parameters(), before, strict=True))
            model[0].requires_grad_(True)
            model[2].requires_grad_(False)
        loss_of(model, rows_of(index)).backward()
        opt.step()
    assert opt.result.applied
    assert not any(torch.equal(p, q) for p, q in zip(model[0].parameters(), before, strict=True))


def test_two_losses_in_one_micro_batch() -> None:
    model = make_model()
    opt = gradaccum.wrap(torch.optim.SGD(model.parameters(), lr=0.5), steps=2)
    for index in range(2):
        opt.backward(loss_of(model, rows_of(2 * index)), weight=3)
        opt.backward(loss_of(model, rows_of(2 * index + 1)), weight=3)
        opt.step()
    reference = make_model()
    (2 * loss_of(reference)).backward()
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p.detach(), q.detach() - 0.5 * q.grad)


def test_weight_zero_runs_no_backward() -> None:
    """The micro-batch is counted all the same."""
    model = make_model()
    opt = gradaccum.wrap(torch.optim.SGD(model.parameters(), lr=0.5), steps=2)
    opt.backward(loss_of(model) * float("nan"), weight=0)
    assert all(p.grad is None for p in model.parameters())
    opt.step()
    opt.backward(loss_of(model), weight=2)
    opt.step()
    assert opt.result.applied
    for p, expected in zip(model.parameters(), large_batch_step(MAKERS["sgd"]), strict=True):
        torch.testing.assert_close(p.detach(), expected)


def test_dropped_wrapper_is_freed_at_once() -> None:
    model = make_model().to(torch.bfloat16)
    opt = gradaccum.wrap(torch.optim.SGD(model.parameters(), lr=0.5), steps=2)
    assert isinstance(opt, AccumulatingOptimizer)
    alive = weakref.ref(opt)
    del opt
    assert alive() is None
