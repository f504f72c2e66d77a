"""Refusals of a call with the large batch, with `.grad` as it was."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradaccum
from gradaccum import GradAccumError, UsageError
from gradaccum_torch import backward, coupled_backward

from .torch_large_batch import Drifting, X, Y, cross_entropy, gradients, make_model

by_dtype = pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
MODEL = make_model()


def loss_fn(x: Tensor, y: Tensor) -> Tensor:
    return cross_entropy(MODEL(x), y)


def wrap(model: nn.Module, **options: Any) -> Any:
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    return gradaccum.wrap(inner, None, **options)


def split(loss_fn: Any, *batch: Any, **options: Any) -> Any:
    return backward(loss_fn, *batch, steps=2, **options)


def couple(outputs_fn: Any, loss_fn: Any = Tensor.std, **options: Any) -> Any:
    return coupled_backward(outputs_fn, loss_fn, X, steps=2, **options)


BAD = {
    "other reduction": (
        "reduction='sum'",
        lambda: split(
            loss_fn,
            X,
            Y,
            reduction="mean",
            optimizer=wrap(make_model(), reduction="sum"),
        ),
    ),
    "coupled, dropping": (
        "skip_window",
        lambda: couple(
            MODEL, optimizer=wrap(make_model(), on_overflow="drop_micro_batch")
        ),
    ),
}


@pytest.mark.parametrize(("words", "call"), BAD.values(), ids=BAD)
def test_bad_input_is_refused(words: str, call: Callable[[], Any]) -> None:
    for p in MODEL.parameters():
        p.grad = torch.ones_like(p)
    held = gradients(MODEL)
    with pytest.raises(GradAccumError, match=words):
        call()
    for p, before in zip(MODEL.parameters(), held, strict=True):
        assert p.grad is before
        assert torch.equal(before, torch.ones_like(p))


@by_dtype
@pytest.mark.parametrize("wrapped", [False, True])
def test_closure_as_a_loss_function_is_refused(
    dtype: torch.dtype, wrapped: bool
) -> None:
    """Its gradient would count twice."""
    model = make_model(dtype)

    def closure(x):
        loss = model(x).square()
        if torch.is_grad_enabled():
            loss.mean().backward(retain_graph=True)
        return loss

    message = r"changes \.grad itself"
    options = {"optimizer": wrap(model, reduction="sum")} if wrapped else {}
    with pytest.raises(UsageError, match=message):
        split(lambda x: closure(x).sum(), X.to(dtype), **options)
    model.zero_grad()
    with pytest.raises(UsageError, match=message):
        coupled_backward(closure, Tensor.std, X.to(dtype), steps=2, **options)


def test_loss_function_that_clears_the_sum_is_refused() -> None:
    model = make_model()

    def clearing(x):
        model.zero_grad()
        return model(x).std()

    with pytest.raises(UsageError, match=r"changes \.grad itself"):
        split(clearing, X)


def test_other_outputs_in_second_pass_are_refused() -> None:
    """A counter that no buffer holds: the gradient would be of another loss."""
    model = make_model()
    factors = iter(range(1, 9))
    with pytest.raises(UsageError, match="the same outputs when it is called again"):
        couple(lambda x: model(x) * (1 + 0.01 * next(factors)))
    assert all(p.grad is None for p in model.parameters())


@by_dtype
def test_wrapped_parameters_need_their_optimizer(dtype: torch.dtype) -> None:
    """Those of another wrapped optimizer too, unless the loss does not reach them."""
    model = make_model(dtype)
    other = make_model(dtype)
    opts = [wrap(each) for each in (model, other)]
    x = X.to(dtype)
    with pytest.raises(UsageError, match="optimizer=opt"):
        split(lambda x: model(x).std(), x)
    with pytest.raises(UsageError, match="requires_grad_"):
        split(lambda x: (model(x) + other(x)).std(), x, optimizer=opts[0])
    assert all(p.grad is None for p in (*model.parameters(), *other.parameters()))
    assert [opt.result.micro_step for opt in opts] == [0, 0]
    split(lambda x: model(x).std(), x, optimizer=opts[0])
    assert opts[0].result.applied


def test_replaced_buffer() -> None:
    """Micro-batch i finds it as in one pass over the micro-batches, and it ends as
    after that pass; after an error the very tensor is back, as somebody else may hold
    it.
    """
    torch.manual_seed(0)
    inner = nn.Linear(6, 2).double()
    model = nn.Sequential(inner, Drifting())
    held = model[1].calls
    factors = torch.arange(1.0, 6).repeat_interleave(2)[:, None]

    def fail(_):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        couple(model, fail)
    assert model[1].calls is held
    assert float(held) == model[1].inputs.numel() == 0
    loss = (inner(X) * factors).std()
    expected = torch.autograd.grad(loss, list(inner.parameters()))
    coupled_backward(model, Tensor.std, X, steps=5)
    torch.testing.assert_close(gradients(model), [*expected], rtol=1e-13, atol=1e-13)
    assert float(model[1].calls) == 5


def test_half_gradients_are_left_to_autograd_after_the_call() -> None:
    """Nothing of the call takes what a later plain backward pass delivers."""
    weight = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    split(lambda x: (x * weight).sum(), torch.ones(4, 2, dtype=torch.bfloat16))
    weight.grad = None
    (weight * 3).sum().backward()
    assert torch.equal(weight.grad, torch.full_like(weight, 3.0))


@pytest.mark.parametrize("is_counted", [False, True])
def test_begun_window_is_refused(is_counted: bool) -> None:
    """And is left as it is."""
    model = make_model()
    opt = wrap(model)
    cross_entropy(model(X), Y).backward()
    if is_counted:
        opt.step()
    held = gradients(model)
    kept = copy.deepcopy(held)
    with pytest.raises(UsageError, match=r"opt\.discard"):
        split(lambda x: model(x).std(), X, optimizer=opt)
    assert opt.result.micro_step == is_counted
    assert all(a is b for a, b in zip(gradients(model), held, strict=True))
    assert all(map(torch.equal, held, kept))
