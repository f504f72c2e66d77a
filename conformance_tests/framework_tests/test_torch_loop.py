"""The wrapped optimizer in the loops that torch's users write."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradaccum
import gradaccum_torch

from .torch_model import (
    MAKERS,
    clip,
    large_batch_step,
    loss_of,
    make,
    make_model,
    rows_of,
    same,
    train,
    values,
)
from .torch_separate import PARTS, X, Y, assert_same, closed_over, large, mse, wrapped
from .torch_separate import make_model as make_separate_model


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
        torch.testing.assert_close(p.detach(), expected, rtol=1e-5, atol=1e-5)
        if order == "zero_grad_last" and not set_to_none:
            assert torch.equal(p.grad, torch.zeros_like(p))
        else:
            assert p.grad is None


def test_zeros_that_were_freed_are_forgotten() -> None:
    """A call that raised has put them back, and no micro-batch is under way."""
    model = make_separate_model()
    opt = wrapped(model, steps=None, separate_sums=False)
    mse(model, X, Y).backward()
    opt.zero_grad(set_to_none=False)
    with pytest.raises(ZeroDivisionError):
        gradaccum_torch.backward(lambda *_: 1 // 0, X, Y, steps=4, optimizer=opt)
    opt.zero_grad()
    for x, y in PARTS:
        mse(model, x, y).backward()
        opt.step()
    opt.flush()
    assert_same(model, large())


def test_wrapper_shares_groups_and_state() -> None:
    inner = torch.optim.AdamW(make_model().parameters(), lr=0.1)
    inner.tag = "x"  # type: ignore[attr-defined]
    opt = gradaccum.wrap(inner, steps=2)
    assert isinstance(opt, torch.optim.Optimizer)
    assert opt.optimizer is inner
    assert opt.tag == "x"
    assert opt.param_groups is inner.param_groups
    assert opt.state is inner.state
    assert opt.defaults is inner.defaults
    opt.param_groups[0]["lr"] = 0.25
    assert inner.param_groups[0]["lr"] == 0.25
    inner.load_state_dict(inner.state_dict())
    assert opt.param_groups is inner.param_groups


def test_hooks_fire_once_per_update() -> None:
    """Each with the optimizer on which it was registered."""
    model, opt = make(steps=2)
    inner, seen = opt.optimizer, list[Any]()
    opt.register_step_pre_hook(lambda o, a, k: seen.append(("pre", o)))
    opt.register_step_post_hook(lambda o, a, k: seen.append(("post", o)))
    inner.register_step_pre_hook(lambda o, a, k: seen.append(("pre", o)))
    train(model, opt, 4)
    assert seen == [("pre", opt), ("pre", inner), ("post", opt)] * 2


def test_pre_hook_may_return_arguments() -> None:
    """The inner step and the post-hooks get these arguments. Torch refuses any other
    value.
    """
    model, seen = make_model(), []

    class Noting(torch.optim.SGD):
        def step(self, closure=None, **kwargs):
            seen.append(kwargs)

    opt = gradaccum.wrap(Noting(model.parameters(), lr=0.5), steps=1)
    handle = opt.register_step_pre_hook(
        lambda o, args, kwargs: (args, {**kwargs, "extra": 1})
    )
    opt.register_step_post_hook(lambda o, args, kwargs: seen.append(kwargs))
    train(model, opt, 1)
    assert seen == [{"extra": 1}, {"extra": 1}]
    handle.remove()
    opt.register_step_pre_hook(lambda o, args, kwargs: 7)
    with pytest.raises(gradaccum.UsageError, match="pre-hook"):
        train(model, opt, 1)
    assert opt.result.micro_step == 1


def test_pre_hook_may_change_the_gradient() -> None:
    model, opt = make(steps=2)
    opt.register_step_pre_hook(
        lambda o, a, k: nn.utils.clip_grad_value_(model.parameters(), 0.0)
    )
    before = values(model)
    train(model, opt, 2)
    assert opt.result.applied
    assert same(model, before)


def test_group_added_in_mid_window_counts() -> None:
    model = make_model()
    first, last = model[0], model[2]
    opt = gradaccum.wrap(torch.optim.SGD(last.parameters(), lr=0.5), steps=2)
    loss_of(model, rows_of(0)).backward()
    opt.step()
    first.zero_grad()
    opt.add_param_group({"params": list(first.parameters()), "lr": 0.25})
    loss_of(model, rows_of(1)).backward()
    expected = [
        p.detach() - 0.25 * p.grad / 2  # type: ignore[operator]
        for p in first.parameters()
    ]
    opt.step()
    torch.testing.assert_close(values(first), expected)


def test_two_losses_in_one_micro_batch() -> None:
    model, opt = make(steps=2)
    for index in range(2):
        opt.weigh(3)
        opt.backward(loss_of(model, rows_of(2 * index)))
        opt.backward(loss_of(model, rows_of(2 * index + 1)))
        opt.step()
    reference = make_model()
    (2 * loss_of(reference)).backward()
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p.detach(), q.detach() - 0.5 * q.grad)


def test_closure_runs_once_per_micro_batch() -> None:
    """By default too: Lightning hands one over in each step."""
    model = make_separate_model()
    opt, calls = wrapped(model, separate_sums=False, clip_norm=1e3), []

    def closure_of(x: Tensor, y: Tensor) -> Callable[[], Tensor]:
        def closure() -> Tensor:
            calls.append(len(x))
            opt.zero_grad()
            loss = mse(model, x, y)
            loss.backward()
            return loss

        return closure

    with torch.no_grad():
        losses = [opt.step(closure_of(x, y)) for x, y in PARTS]
    assert calls == [2, 2, 2, 2]
    assert float(sum(losses).detach() / 4) == pytest.approx(
        float(mse(make_separate_model(), X, Y).detach())
    )
    assert_same(model, large())


def test_closure_that_raises_counts_nothing() -> None:
    model = make_separate_model()
    opt = wrapped(model)
    with pytest.raises(ZeroDivisionError):
        opt.step(lambda: 1 / 0)
    assert opt.result.micro_step == 0
    for x, y in PARTS:
        closed_over(model, opt, x, y)
    assert_same(model, large())


class Again(torch.optim.SGD):
    """An optimizer that needs a closure, which its signature does not tell."""

    def step(self, closure=None):
        if closure is None:
            raise RuntimeError("this optimizer needs a closure")
        return super().step(closure)


class AgainByCall(torch.optim.SGD):
    def step(self, closure=None):
        with torch.enable_grad():
            return closure()


class OutOfDisk(torch.optim.SGD):
    def step(self, closure=None):
        raise RuntimeError("out of disk")


@pytest.mark.parametrize("call", ["step(closure)", "step()", "flush()"])
@pytest.mark.parametrize("kind", [Again, AgainByCall, OutOfDisk])
def test_optimizer_that_turns_out_to_need_one_says_what_to_write(
    kind: type[torch.optim.Optimizer], call: str
) -> None:
    """Another error has no note."""
    model = make_separate_model()
    opt = gradaccum.wrap(
        kind(model.parameters(), lr=0.1),
        steps=None if call == "flush()" else 2,
        separate_sums=True,
    )

    def micro_batch(x: Tensor, y: Tensor) -> None:
        if call == "step(closure)":
            closed_over(model, opt, x, y)
        else:
            mse(model, x, y).backward()
            opt.step()

    def window() -> None:
        micro_batch(*PARTS[0])
        micro_batch(*PARTS[1])
        opt.flush()

    with pytest.raises((RuntimeError, TypeError)) as caught:
        window()
    notes = getattr(caught.value, "__notes__", [])
    assert ["used bare" in note for note in notes] == [True] * (kind is not OutOfDisk)
    if kind is not OutOfDisk:
        assert opt.result.micro_step == 2, "the window stays"


def test_clipping_by_hand_is_refused() -> None:
    """Also in the micro-batch by which a window of weight 1 ends only perhaps."""
    model, opt = make(steps=gradaccum.until_weight(2))
    opt.backward(loss_of(model), weight=1)
    clip(model)
    with pytest.raises(gradaccum.UsageError, match="clip_norm"):
        opt.step()
