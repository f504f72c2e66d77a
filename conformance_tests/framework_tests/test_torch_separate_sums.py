"""``separate_sums=True``: between two steps ``.grad`` is the user's. Loops that the default refuses equal the large batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs PyTorch")

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

import gradaccum
from conformance_tests.framework_tests.refusing import refused
from conformance_tests.framework_tests.torch_separate import (
    PARTS,
    assert_same,
    before_clear,
    closed_over,
    large,
    logged_norm,
    make_model,
    mse,
    wrapped,
)
from gradaccum import UsageError
from gradaccum_torch.optimizer import AccumulatingOptimizer


def after_clear(model: nn.Module, opt: AccumulatingOptimizer, x: Tensor, y: Tensor) -> None:
    mse(model, x, y).backward()
    opt.step()
    model.zero_grad(set_to_none=False)


def no_clear(model: nn.Module, opt: AccumulatingOptimizer, x: Tensor, y: Tensor) -> None:
    mse(model, x, y).backward()
    opt.step()


def assigned(model: nn.Module, opt: AccumulatingOptimizer, x: Tensor, y: Tensor) -> None:
    """The loop goes on to use the tensors that it assigned."""
    gradients = torch.autograd.grad(mse(model, x, y), list(model.parameters()))
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        parameter.grad = gradient
    opt.step()
    for gradient in gradients:
        gradient.fill_(float("nan"))


def functional(model: nn.Module, opt: AccumulatingOptimizer, x: Tensor, y: Tensor) -> None:
    def loss(parameters: dict[str, Tensor]) -> Tensor:
        return (torch.func.functional_call(model, parameters, x) - y).square().mean()

    named = dict(model.named_parameters())
    for name, gradient in torch.func.grad(loss)({name: each.detach() for name, each in named.items()}).items():
        named[name].grad = gradient
    opt.step()


def flat_views(model: nn.Module, opt: AccumulatingOptimizer, x: Tensor, y: Tensor) -> None:
    """Every ``.grad`` is a part of one buffer that the loop keeps, as reducers do."""
    gradients = torch.autograd.grad(mse(model, x, y), list(model.parameters()))
    buffer = torch.cat([gradient.flatten() for gradient in gradients])
    parts = buffer.split([gradient.numel() for gradient in gradients])
    for parameter, part in zip(model.parameters(), parts, strict=True):
        parameter.grad = part.view_as(parameter)
    opt.step()
    buffer.zero_()


def polluted(model: nn.Module, opt: AccumulatingOptimizer, x: Tensor, y: Tensor) -> None:
    """As a discriminator, through which the generator's loss goes after its own step."""
    opt.zero_grad()
    mse(model, x, y).backward()
    opt.step()
    (1e3 * model(x).sum()).backward()


def tried_again(model: nn.Module, opt: AccumulatingOptimizer, x: Tensor, y: Tensor) -> None:
    """A backward pass that raises is tried again, as after running out of memory."""
    model.zero_grad()
    (handle,) = [model[0].weight.register_hook(_raising)]
    with pytest.raises(ZeroDivisionError):
        mse(model, x, y).backward()
    handle.remove()
    model.zero_grad()
    mse(model, x, y).backward()
    opt.step()


def _raising(gradient: Tensor) -> None:
    raise ZeroDivisionError


LOOPS = [before_clear, after_clear, no_clear, logged_norm, assigned, functional, flat_views, polluted, tried_again, closed_over]


@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
@pytest.mark.parametrize("options", [{}, {"on_overflow": "drop_micro_batch"}], ids=["plain", "dropping"])
def test_loop_equals_large_batch(loop: Callable[..., None], options: dict[str, Any]) -> None:
    model = make_model()
    opt = wrapped(model, **options)
    for _ in range(3):
        for x, y in PARTS:
            loop(model, opt, x, y)
    assert_same(model, large(3))
    assert opt.result.optimizer_step == 3


@pytest.mark.parametrize("loop", [before_clear, logged_norm, assigned, functional, flat_views], ids=lambda loop: loop.__name__)
def test_default_refuses_by_name(loop: Callable[..., None]) -> None:
    """What it cannot do right it refuses, and the error names the way out."""

    def epoch() -> None:
        model = make_model()
        opt = wrapped(model, separate_sums=False)
        for x, y in PARTS:
            loop(model, opt, x, y)

    with refused(UsageError, "separate_sums=True"):
        epoch()


def test_clip_per_micro_batch() -> None:
    """Each micro-batch is clipped by the user, the mean of the clipped ones by nobody."""
    model, shadow = make_model(), make_model()
    opt = wrapped(model)
    bare = torch.optim.SGD(shadow.parameters(), lr=0.1, momentum=0.9)
    total = [torch.zeros_like(each) for each in shadow.parameters()]
    for x, y in PARTS:
        mse(model, x, y).backward()
        clip_grad_norm_(model.parameters(), 0.1)
        opt.step()
        shadow.zero_grad()
        mse(shadow, x, y).backward()
        clip_grad_norm_(shadow.parameters(), 0.1)
        total = [a + each.grad / 4 for a, each in zip(total, shadow.parameters(), strict=True)]
    for each, gradient in zip(shadow.parameters(), total, strict=True):
        each.grad = gradient
    bare.step()
    assert_same(model, list(shadow.parameters()))


def test_not_a_bool() -> None:
    with pytest.raises(gradaccum.ArgumentTypeError, match="separate_sums"):
        wrapped(make_model(), separate_sums=1)
