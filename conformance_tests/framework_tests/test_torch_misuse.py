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
from conformance_tests.framework_tests.torch_model import (
    X,
    loss_of,
    make,
    make_model,
    same,
    values,
)
from gradaccum import ArgumentTypeError, ArgumentValueError, UsageError


def sgd(kind: type[Any] = torch.optim.SGD, **options: Any) -> Any:
    return kind(make_model().parameters(), lr=0.5, **options)


class Evaluating(torch.optim.SGD):
    def step(self, model, *more, batch, closure=None, **others):
        return super().step()


Refusal = tuple[Callable[..., Any], type[Exception], str]
BY_WRAP: list[Refusal] = [
    (lambda: gradaccum.wrap(make()[1], steps=2), ArgumentTypeError, "optimizer: "),
    (lambda: gradaccum.wrap(sgd()), ArgumentTypeError, "steps: "),
    (
        lambda: gradaccum.wrap(sgd(), steps=2, accumulate_dtype=torch.int64),
        ArgumentTypeError,
        "accumulate_dtype: ",
    ),
    (
        lambda: gradaccum.wrap(sgd(), steps=2, separate_sums=1),
        ArgumentTypeError,
        "separate_sums: ",
    ),
    (
        lambda: gradaccum.wrap(
            sgd(),
            steps=2,
            on_overflow="ignore",
            loss_scale=torch.amp.GradScaler("cpu"),
        ),
        ArgumentValueError,
        "loss_scale: expected one that does not move",
    ),
    (
        lambda: gradaccum.wrap(sgd(Evaluating), steps=2),
        ArgumentTypeError,
        r"optimizer: .*Evaluating, whose step needs model and batch\.",
    ),
    (
        lambda: gradaccum.wrap(sgd(torch.optim.LBFGS), steps=1),
        ArgumentTypeError,
        "optimizer: .*LBFGS, whose step evaluates the model again",
    ),
    (
        lambda: gradaccum.wrap(sgd(torch.optim.LBFGS), steps=4, separate_sums=True),
        ArgumentTypeError,
        "optimizer: .*LBFGS, whose step evaluates the model again",
    ),
]
BY_A_METHOD: list[Refusal] = [
    (lambda opt: opt.backward(3.0), ArgumentTypeError, "loss: "),
    (lambda opt: opt.weigh("3"), ArgumentTypeError, "weight: expected"),
    (lambda opt: opt.weigh(-1), ArgumentValueError, "weight: expected"),
    (lambda opt: opt.weigh(float("nan")), ArgumentValueError, "weight: expected"),
    (
        lambda opt: opt.step(weight=3),
        ArgumentTypeError,
        r"step\(\): .*got weight=3\. Write .*weight=3\)",
    ),
    (
        lambda opt: opt.step(3),
        ArgumentTypeError,
        r"step\(\): .*got closure=3\. Write opt\.backward\(loss\)",
    ),
    (
        lambda opt: opt.step(lr=0.1),
        ArgumentTypeError,
        r"step\(\): .*got lr=0\.1\. .* without an argument",
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
    with pytest.raises(kind, match=f"^{words}"):
        call(opt)
    opt.step()
    assert opt.result.micro_step == 1


@pytest.mark.parametrize(
    ("weight", "tell"),
    [(3, {"weight": 3}), (1, {}), (3, None)],
    ids=["named", "left out", "before a loss"],
)
def test_second_weight_is_refused(weight: int, tell: dict[str, int] | None) -> None:
    """A micro-batch has one weight, however many losses it has."""
    model, opt = make(steps=2)
    if tell is None:
        opt.weigh(weight)
    else:
        opt.backward(loss_of(model), **tell)
    held = [p.grad if p.grad is None else p.grad.clone() for p in model.parameters()]
    for call in (lambda: opt.backward(loss_of(model), weight=4), lambda: opt.weigh(4)):
        with pytest.raises(UsageError, match=f"weight: expected {weight}"):
            call()
    assert all(
        p.grad is g or torch.equal(p.grad, g)
        for p, g in zip(model.parameters(), held, strict=True)
    )
    opt.step()
    assert opt.result.micro_step == 1


def test_unscaled_backward_is_refused() -> None:
    """Under a loss scale, `loss.backward()` alone does not scale the loss."""
    words = "multiplied by the loss scale and the weight"
    model, opt = make(loss_scale=1024.0)
    loss_of(model).backward()
    with pytest.raises(UsageError, match=words):
        opt.step()
    assert opt.result.micro_step == 0
    opt.discard()
    opt.backward(loss_of(model))
    loss_of(model).backward()
    with pytest.raises(UsageError, match=words):
        opt.step()


def test_attributes_that_are_elsewhere_say_where() -> None:
    _, opt = make()
    for name in gradaccum.StepResult._fields:
        assert not hasattr(opt, name)
        with pytest.raises(AttributeError, match=rf"Read opt\.result\.{name}\."):
            getattr(opt, name)
    with pytest.raises(AttributeError, match=r"Call opt\.step\(\) after each"):
        opt.accumulate  # noqa: B018
    with pytest.raises(AttributeError, match="'SGD' object has no attribute 'norms'"):
        opt.norms  # noqa: B018
    opt.optimizer.loss_scale = "the inner optimizer's own"
    assert opt.loss_scale == "the inner optimizer's own"


SCALES: dict[str, Callable[[], dict[str, Any]]] = {
    "none": dict,
    "static": lambda: {"loss_scale": 8.0},
    "scaler": lambda: {"loss_scale": torch.amp.GradScaler("cpu", init_scale=8.0)},
}


@pytest.mark.parametrize("scale", SCALES)
def test_backward_works_under_no_grad(scale: str) -> None:
    models = []
    for around in (torch.no_grad, torch.enable_grad):
        model, opt = make(steps=1, **SCALES[scale]())
        for is_scaled in (False, True):
            loss = loss_of(model)
            with around():
                if is_scaled:
                    opt.scale(loss).backward()
                else:
                    opt.backward(loss, weight=3)
            opt.step()
        assert opt.result.optimizer_step == 2
        models.append(model)
    assert same(*models)


def half(**options: Any) -> tuple[torch.Tensor, Any]:
    parameter = torch.ones(2, dtype=torch.float16, requires_grad=True)
    return parameter, gradaccum.wrap(
        torch.optim.SGD([parameter], lr=0.5), steps=1, **options
    )


@pytest.mark.parametrize(
    "options",
    [{}, {"loss_scale": gradaccum.DynamicLossScale()}, {"master_weights": True}],
    ids=str,
)
def test_weight_beyond_float16_is_refused(options: dict) -> None:
    """Autograd passes the weight on in the dtype of the loss. float16 makes it inf,
    float32 does not.
    """
    parameter, opt = half(**options)
    with pytest.raises(UsageError, match=r"output\.float\(\)"):
        opt.backward((parameter * 1e-3).mean(), weight=131072)
    assert opt.result.micro_step == 0
    opt.backward((parameter * 1e-3).mean(), weight=8)
    with pytest.raises(UsageError, match="weight"):
        opt.backward((parameter.float() * 1e-3).mean(), weight=131072)
    opt.step()
    assert opt.result.micro_step == 0


@pytest.mark.parametrize(
    "scale",
    [gradaccum.DynamicLossScale, lambda: torch.amp.GradScaler("cpu")],
    ids=["dynamic", "scaler"],
)
def test_scale_beyond_float16_backs_off(scale: Callable[[], object]) -> None:
    """The default of 2^16 is just beyond float16. It costs one window and is not
    refused.
    """
    parameter, opt = half(loss_scale=scale())
    for _ in range(2):
        opt.backward(parameter.mean())
        opt.step()
    assert opt.result.applied


def test_messages_name_a_way_out() -> None:
    """One message is for a backward pass that is no micro-batch, the other one for
    gradients that the user sets.
    """
    model, opt = make(steps=2)
    loss_of(model).backward()
    opt.step()
    loss_of(model).backward()
    with pytest.raises(UsageError, match=r"loss\.backward\(inputs="):
        opt.zero_grad()
    opt.discard()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    with pytest.raises(
        UsageError, match=r"torch\.autograd\.backward\(parameters, gradients\)"
    ):
        opt.step()


def two_optimizers(steps: int = 2, **options: object) -> tuple[nn.Module, Any, Any]:
    model = make_model()
    first, *others = model.parameters()
    return model, *(
        gradaccum.wrap(torch.optim.SGD(part, lr=0.1), steps=steps, **options)
        for part in ([first], others)
    )


def require_moved(model: nn.Module, before: list[Any], gradients: Any) -> None:
    for now, was, gradient in zip(model.parameters(), before, gradients, strict=True):
        torch.testing.assert_close(now.detach(), was - 0.1 * gradient)


@pytest.mark.parametrize("multiplied", ["weight", "loss scale"])
def test_gradients_that_another_optimizer_multiplied_are_refused(
    multiplied: str,
) -> None:
    options = {} if multiplied == "weight" else {"loss_scale": 8.0}
    model, one, other = two_optimizers(**options)
    one.backward(loss_of(model), weight=3 if multiplied == "weight" else 1)
    one.step()
    with pytest.raises(
        UsageError, match="another wrapped" if multiplied == "weight" else "loss"
    ):
        other.step()
    other.zero_grad()
    other.backward(loss_of(model))
    other.step()
    assert other.result.micro_step == 1, "what was cleared is forgotten"


def test_one_loss_of_two_optimizers_without_a_weight() -> None:
    model, one, other = two_optimizers(reduction="sum")
    expected = torch.autograd.grad(loss_of(model), list(model.parameters()))
    before = values(model)
    for _ in range(2):
        one.backward(loss_of(model) / 2)
        one.step()
        other.step()
    require_moved(model, before, expected)


@pytest.mark.parametrize("set_to_none", [False, True])
def test_what_another_optimizer_left_can_be_cleared_by_the_model(
    set_to_none: bool,
) -> None:
    """As in the usual loop of a GAN, where ``netD.zero_grad()`` comes before the
    discriminator's own backward pass.
    """
    model, one, two = two_optimizers(steps=1)
    _, *expected = torch.autograd.grad(loss_of(model), list(model.parameters()))
    one.backward(loss_of(model), weight=3)
    model.zero_grad(set_to_none=set_to_none)
    before = values(model)
    two.backward(loss_of(model))
    two.step()
    require_moved(model, before, [torch.zeros(()), *expected])


class Describing(torch.optim.SGD):
    def describe(self) -> int:
        return len(self.param_groups)


def test_methods_of_the_inner_optimizer_can_be_called() -> None:
    """In mid-micro-batch, and in mid-window."""
    weight = nn.Parameter(torch.ones(3))
    opt = gradaccum.wrap(Describing([weight], lr=0.5), steps=2)
    (X @ weight).sum().backward()
    assert opt.describe() == 1
    assert opt.describe.__name__ == "describe"
    opt.step()
    assert opt.describe() == 1
