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
from conformance_tests.framework_tests.torch_model import loss_of, make_model, rows_of


@pytest.mark.parametrize(
    ("weight", "tell"),
    [(3, {"weight": 3}), (1, {}), (3, None)],
    ids=["named", "left out", "before a loss"],
)
def test_second_weight_is_refused(weight: int, tell: dict[str, int] | None) -> None:
    """A micro-batch has one weight, however many losses it has."""
    model = make_model()
    opt = gradaccum.wrap(torch.optim.SGD(model.parameters(), lr=0.5), steps=2)
    if tell is None:
        opt.weigh(weight)
    else:
        opt.backward(loss_of(model), **tell)
    held = [p.grad if p.grad is None else p.grad.clone() for p in model.parameters()]
    for call in (lambda: opt.backward(loss_of(model), weight=4), lambda: opt.weigh(4)):
        with pytest.raises(gradaccum.UsageError, match=f"weight: expected {weight}"):
            call()
    assert all(
        p.grad is g or torch.equal(p.grad, g)
        for p, g in zip(model.parameters(), held, strict=True)
    )
    opt.step()
    assert opt.result.micro_step == 1


def test_unscaled_backward_is_refused() -> None:
    """Under a loss scale, `loss.backward()` alone does not scale the loss."""
    model = make_model()
    opt = gradaccum.wrap(
        torch.optim.SGD(model.parameters(), lr=0.5), steps=4, loss_scale=1024.0
    )
    loss_of(model).backward()
    with pytest.raises(
        gradaccum.UsageError, match="multiplied by the loss scale and the weight"
    ):
        opt.step()
    assert opt.result.micro_step == 0
    opt.discard()
    opt.backward(loss_of(model))
    loss_of(model).backward()
    with pytest.raises(
        gradaccum.UsageError, match="multiplied by the loss scale and the weight"
    ):
        opt.step()


def test_wrong_objects_are_refused() -> None:
    opt = gradaccum.wrap(torch.optim.SGD(make_model().parameters(), lr=0.5), steps=2)
    with pytest.raises(gradaccum.ArgumentTypeError, match="wrapped"):
        gradaccum.wrap(opt, steps=2)
    with pytest.raises(gradaccum.ArgumentTypeError, match="steps"):
        gradaccum.wrap(torch.optim.SGD(make_model().parameters(), lr=0.5))
    with pytest.raises(gradaccum.ArgumentTypeError, match="loss"):
        opt.backward(3.0)
    with pytest.raises(gradaccum.ArgumentTypeError, match="accumulate_dtype"):
        gradaccum.wrap(
            torch.optim.SGD(make_model().parameters(), lr=0.5),
            steps=2,
            accumulate_dtype=torch.int64,
        )


@pytest.mark.parametrize(
    ("step", "fix"),
    [
        (lambda opt: opt.step(weight=3), r"got weight=3\. Write .*weight=3\)"),
        (lambda opt: opt.step(3), r"got closure=3\. Write opt\.backward\(loss\)"),
        (lambda opt: opt.step(lr=0.1), r"got lr=0\.1\. .* without an argument"),
    ],
    ids=["weight", "position", "other"],
)
def test_arguments_of_step_are_refused(step: Callable[[Any], object], fix: str) -> None:
    model = make_model()
    opt = gradaccum.wrap(torch.optim.SGD(model.parameters(), lr=0.5), steps=2)
    opt.backward(loss_of(model), weight=3)
    with pytest.raises(gradaccum.ArgumentTypeError, match=rf"^step\(\): .*{fix}"):
        step(opt)
    opt.step()
    assert opt.result.micro_step == 1


def test_attributes_that_are_elsewhere_say_where() -> None:
    model = make_model()
    opt = gradaccum.wrap(torch.optim.SGD(model.parameters(), lr=0.5), steps=2)
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


SCALES = {
    "none": {},
    "static": {"loss_scale": 8.0},
    "scaler": {"loss_scale": torch.amp.GradScaler("cpu", init_scale=8.0)},
}


@pytest.mark.parametrize("options", SCALES.values(), ids=SCALES)
def test_backward_works_under_no_grad(options: dict) -> None:
    models = make_model(), make_model()
    for model, around in zip(models, (torch.no_grad, torch.enable_grad), strict=True):
        opt = gradaccum.wrap(
            torch.optim.SGD(model.parameters(), lr=0.5), steps=1, **options
        )
        loss = loss_of(model)
        with around():
            opt.backward(loss, weight=3)
        opt.step()
        loss = loss_of(model)
        with around():
            opt.scale(loss).backward()
        opt.step()
        assert opt.result.optimizer_step == 2
    assert all(
        torch.equal(p, q)
        for p, q in zip(*(model.parameters() for model in models), strict=True)
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
    parameter = torch.ones(2, dtype=torch.float16, requires_grad=True)
    opt = gradaccum.wrap(torch.optim.SGD([parameter], lr=0.5), steps=1, **options)
    with pytest.raises(gradaccum.UsageError, match=r"output\.float\(\)"):
        opt.backward((parameter * 1e-3).mean(), weight=131072)
    assert opt.result.micro_step == 0
    opt.backward((parameter * 1e-3).mean(), weight=8)
    with pytest.raises(gradaccum.UsageError, match="weight"):
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
    parameter = torch.ones(2, dtype=torch.float16, requires_grad=True)
    opt = gradaccum.wrap(
        torch.optim.SGD([parameter], lr=0.5), steps=1, loss_scale=scale()
    )
    for _ in range(2):
        opt.backward(parameter.mean())
        opt.step()
    assert opt.result.applied


def test_messages_name_a_way_out() -> None:
    """One message is for a backward pass that is no micro-batch, the other one for
    gradients that the user sets.
    """
    model = make_model()
    opt = gradaccum.wrap(torch.optim.SGD(model.parameters(), lr=0.5), steps=2)
    loss_of(model).backward()
    opt.step()
    loss_of(model).backward()
    with pytest.raises(gradaccum.UsageError, match=r"loss\.backward\(inputs="):
        opt.zero_grad()
    opt.discard()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    with pytest.raises(
        gradaccum.UsageError,
        match=r"torch\.autograd\.backward\(parameters, gradients\)",
    ):
        opt.step()


def two_optimizers(**options: object) -> tuple[nn.Module, Any, Any]:
    model = make_model()
    own, other = list(model.parameters())[:1], list(model.parameters())[1:]
    return model, *(
        gradaccum.wrap(torch.optim.SGD(part, lr=0.1), steps=2, **options)
        for part in (own, other)
    )


@pytest.mark.parametrize("multiplied", ["weight", "loss scale"])
def test_gradients_that_another_optimizer_multiplied_are_refused(
    multiplied: str,
) -> None:
    options = {} if multiplied == "weight" else {"loss_scale": 8.0}
    model, one, other = two_optimizers(**options)
    one.backward(loss_of(model), weight=3 if multiplied == "weight" else 1)
    one.step()
    with pytest.raises(
        gradaccum.UsageError,
        match="another wrapped" if multiplied == "weight" else "loss",
    ):
        other.step()
    other.zero_grad()
    other.backward(loss_of(model))
    other.step()
    assert other.result.micro_step == 1, "what was cleared is forgotten"


def test_one_loss_of_two_optimizers_without_a_weight() -> None:
    model, one, other = two_optimizers(reduction="sum")
    expected = torch.autograd.grad(loss_of(model), list(model.parameters()))
    before = [p.detach().clone() for p in model.parameters()]
    for _ in range(2):
        one.backward(loss_of(model) / 2)
        one.step()
        other.step()
    for was, now, gradient in zip(before, model.parameters(), expected, strict=True):
        torch.testing.assert_close(now.detach(), was - 0.1 * gradient)


@pytest.mark.parametrize("set_to_none", [False, True])
def test_what_another_optimizer_left_can_be_cleared_by_the_model(
    set_to_none: bool,
) -> None:
    """As in the usual loop of a GAN, where ``netD.zero_grad()`` comes before the
    discriminator's own backward pass.
    """
    model = make_model()
    own, other = list(model.parameters())[:1], list(model.parameters())[1:]
    one, two = (
        gradaccum.wrap(torch.optim.SGD(part, lr=0.1), steps=1) for part in (own, other)
    )
    expected = torch.autograd.grad(loss_of(model), other)
    one.backward(loss_of(model), weight=3)
    model.zero_grad(set_to_none=set_to_none)
    before = [p.detach().clone() for p in other]
    two.backward(loss_of(model))
    two.step()
    for was, now, gradient in zip(before, other, expected, strict=True):
        torch.testing.assert_close(now.detach(), was - 0.1 * gradient)


class SAM(torch.optim.SGD):
    """Two updates a batch: up the gradient, and down with the gradient found there
    (Foret et al., 2021), as published code has it.
    """

    @torch.no_grad()
    def first_step(self, zero_grad: bool = False) -> None:
        held = [
            p
            for group in self.param_groups
            for p in group["params"]
            if p.grad is not None
        ]
        norm = torch.stack([p.grad.norm() for p in held]).norm()
        for p in held:
            self.state[p]["old"] = p.data.clone()
            p.add_(p.grad, alpha=0.05 / float(norm))
        if zero_grad:
            self.zero_grad()

    def forget(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.grad = None

    def with_gradients_of(self, loss: torch.Tensor) -> None:
        loss.backward()
        self.first_step()

    def describe(self) -> int:
        return len(self.param_groups)


def make(**options: Any) -> tuple[nn.Module, Any]:
    model = make_model()
    return model, gradaccum.wrap(
        SAM(model.parameters(), lr=0.5), **{"steps": 2, **options}
    )


def test_harmless_method_passes() -> None:
    model, opt = make()
    loss_of(model, rows_of(0)).backward()
    assert opt.describe() == 1
    assert opt.describe.__name__ == "describe"
    opt.step()
    assert opt.describe() == 1
