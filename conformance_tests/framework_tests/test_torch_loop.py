"""The wrapped optimizer in the loops that torch's users write."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradaccum
import gradaccum_torch
from gradaccum import UsageError

from .torch_model import MAKERS, large_batch_step, loss_of, make_model, rows_of
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
    start = [p.detach().clone() for p in model.parameters()]
    for index in range(4):
        if order == "zero_grad_first":
            opt.zero_grad(set_to_none=set_to_none)
        assert all(
            torch.equal(p, q) for p, q in zip(model.parameters(), start, strict=True)
        )
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
    opt.register_step_pre_hook(
        lambda o, a, k: seen.append("pre" if o is opt else "wrong")
    )
    opt.register_step_post_hook(
        lambda o, a, k: seen.append("post" if o is opt else "wrong")
    )
    inner.register_step_pre_hook(
        lambda o, a, k: seen.append("inner pre" if o is inner else "wrong")
    )
    for index in range(4):
        loss_of(model, rows_of(index)).backward()
        opt.step()
    assert seen == ["pre", "inner pre", "post"] * 2


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
    opt.register_step_pre_hook(
        lambda o, a, k: nn.utils.clip_grad_value_(model.parameters(), 0.0)
    )
    before = [p.detach().clone() for p in model.parameters()]
    for index in range(2):
        loss_of(model, rows_of(index)).backward()
        opt.step()
    assert all(
        torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True)
    )


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
            assert all(
                torch.equal(p, q)
                for p, q in zip(model[0].parameters(), before, strict=True)
            )
            model[0].requires_grad_(True)
            model[2].requires_grad_(False)
        loss_of(model, rows_of(index)).backward()
        opt.step()
    assert opt.result.applied
    assert not any(
        torch.equal(p, q) for p, q in zip(model[0].parameters(), before, strict=True)
    )


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


def test_optimizer_that_turns_out_to_need_one_says_what_to_write() -> None:
    class Again(torch.optim.SGD):
        def step(self, closure=None):
            if closure is None:
                raise RuntimeError("this optimizer needs a closure")
            return super().step(closure)

    model = make_separate_model()
    opt = gradaccum.wrap(Again(model.parameters(), lr=0.1), steps=2, separate_sums=True)
    closed_over(model, opt, *PARTS[0])
    with pytest.raises(RuntimeError, match="needs a closure") as caught:
        closed_over(model, opt, *PARTS[1])
    assert "used bare" in caught.value.__notes__[0]
    assert opt.result.micro_step == 2, "the window stays"


@pytest.mark.parametrize(
    "options", [{"steps": 1}, {"steps": 4, "separate_sums": True}], ids=str
)
def test_optimizer_that_needs_a_closure_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(
        gradaccum.ArgumentTypeError,
        match=r"optimizer: .*LBFGS, whose step evaluates the model again",
    ):
        gradaccum.wrap(torch.optim.LBFGS(make_separate_model().parameters()), **options)


def setting(
    steps: Any, dtype: torch.dtype = torch.float32, **options: Any
) -> tuple[torch.nn.Parameter, Any]:
    parameter = torch.nn.Parameter(torch.tensor([1.0, -1.0], dtype=dtype))
    return parameter, gradaccum.wrap(
        torch.optim.SGD([parameter], lr=0.5), steps=steps, **options
    )


def feed(parameter: torch.nn.Parameter, opt: Any, *weights: float) -> list[int]:
    """The update at which each of these micro-batches left the run."""
    updates = []
    for weight in weights:
        opt.backward(parameter.square().sum(), weight=weight)
        opt.step()
        opt.zero_grad()
        updates.append(opt.result.optimizer_step)
    return updates


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"separate_sums": True},
        {"dtype": torch.bfloat16},
        {"on_overflow": "drop_micro_batch"},
    ],
    ids=str,
)
def test_ends(options: dict[str, Any]) -> None:
    """A window of one micro-batch, where the weight is reached at once, is not taken
    for one that is known to have one.
    """
    parameter, opt = setting(gradaccum.until_weight(1), **options)
    assert feed(parameter, opt, 1, 0, 0.5, 0.5, 7) == [1, 1, 1, 2, 3]


@pytest.mark.parametrize("given", [0, 2.5, None, True])
def test_bad_answers_are_refused_at_step(given: object) -> None:
    parameter, opt = setting(gradaccum.until_weight(lambda step: given))
    opt.backward(parameter.sum(), weight=1)
    with pytest.raises((TypeError, ValueError), match=r"until_weight\(\.\.\.\)\(0\)"):
        opt.step()
    assert opt.result.micro_step == 0


def test_repr() -> None:
    parameter, opt = setting(gradaccum.until_weight(128))
    feed(parameter, opt, 64, 32)
    assert (
        repr(opt)
        == "AccumulatingOptimizer(SGD, steps=until_weight(128) | micro-batch 2, weight"
        " 96 of 128, update 0)"
    )


def test_clipping_by_hand_is_refused() -> None:
    """Also in the micro-batch by which a window of weight 1 ends only perhaps."""
    parameter, opt = setting(gradaccum.until_weight(2))
    opt.backward(parameter.square().sum(), weight=1)
    torch.nn.utils.clip_grad_norm_([parameter], 0.1)
    with pytest.raises(UsageError, match="clip_norm"):
        opt.step()
