"""The wrapped optimizer refuses misuse with an error that names it, and nothing
accumulated is lost.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import gradaccum
from gradaccum import ArgumentTypeError, ArgumentValueError, UsageError

from .torch_model import MAKERS, loss_of, make, make_model


def wrap(kind: type[Any] = torch.optim.SGD, **options: Any) -> Any:
    return gradaccum.wrap(kind(make_model().parameters(), lr=0.5), **options)


BY_WRAP = [
    (lambda: gradaccum.wrap(wrap(steps=2), steps=2), ArgumentTypeError, "optimizer: "),
    (
        lambda: wrap(
            steps=2, on_overflow="ignore", loss_scale=torch.amp.GradScaler("cpu")
        ),
        ArgumentValueError,
        "loss_scale: expected a static scale",
    ),
]
BY_A_METHOD = [
    (lambda opt: opt.weigh(4), UsageError, "weight: expected 3"),
    (
        lambda opt: opt.backward(torch.ones((), requires_grad=True), weight=4),
        UsageError,
        "weight: expected 3",
    ),
]


@pytest.mark.parametrize(("call", "kind", "words"), BY_WRAP)
def test_refused_by_wrap(
    call: Callable[[], object], kind: type[Exception], words: str
) -> None:
    with pytest.raises(kind, match=f"^{words}"):
        call()


@pytest.mark.parametrize(("call", "kind", "words"), BY_A_METHOD)
def test_refused_by_a_method(
    call: Callable[[Any], object], kind: type[Exception], words: str
) -> None:
    """The micro-batch under way stays."""
    model, opt = make(steps=2)
    opt.backward(loss_of(model), weight=3)
    gradient = model[0].weight.grad.clone()
    with pytest.raises(kind, match=f"^{words}"):
        call(opt)
    assert torch.equal(model[0].weight.grad, gradient)
    opt.step()
    assert opt.result.micro_step == 1


def test_unscaled_backward_is_refused() -> None:
    """Under a loss scale, `loss.backward()` alone does not scale the loss."""
    model, opt = make(loss_scale=1024.0)
    for before in (False, True):
        if before:
            opt.backward(loss_of(model))
        loss_of(model).backward()
        with pytest.raises(UsageError, match="that this optimizer had scaled"):
            opt.step()
        assert opt.result.micro_step == 0
        opt.discard()


def two_optimizers(**options: object) -> tuple[nn.Module, Any, Any]:
    model = make_model()
    first, *others = model.parameters()
    return model, *(
        gradaccum.wrap(MAKERS["sgd"](part), steps=1, **options)
        for part in ([first], others)
    )


@pytest.mark.parametrize(
    "options", [{}, {"separate_sums": True}, {"loss_scale": 8.0}], ids=str
)
def test_gradients_that_another_optimizer_multiplied_are_refused(
    options: dict[str, Any],
) -> None:
    """Unless they are cleared, by the model too, as in a GAN's loop."""
    is_weight = "loss_scale" not in options
    model, one, other = two_optimizers(**options)
    for clears in (other, model) if is_weight else (other,):
        one.backward(loss_of(model), weight=3 if is_weight else 1)
        one.step()
        other.flush()
        with pytest.raises(UsageError, match="another wrapped"):
            other.step()
        clears.zero_grad()
        other.backward(loss_of(model))
        other.step()
        assert other.result.applied, "what was cleared is forgotten"
        one.zero_grad()
