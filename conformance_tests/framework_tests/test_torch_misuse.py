"""What the wrapped optimizer refuses, by name, with what was accumulated before it still there."""

from __future__ import annotations

from collections.abc import Callable

import pytest

pytest.importorskip("torch", reason="needs PyTorch")

import torch
from torch import nn

import gradaccum
from conformance_tests.framework_tests.torch_model import loss_of, make_model


def test_two_weights_in_one_micro_batch_are_refused() -> None:
    model = make_model()
    opt = gradaccum.wrap(torch.optim.SGD(model.parameters(), lr=0.5), steps=2)
    opt.backward(loss_of(model), weight=3)
    held = [p.grad.clone() for p in model.parameters()]
    with pytest.raises(gradaccum.UsageError, match="weight"):
        opt.backward(loss_of(model), weight=4)
    with pytest.raises(gradaccum.UsageError, match="weight"):
        opt.scale(loss_of(model))
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), held, strict=True))
    opt.step()
    assert opt.result.micro_step == 1


def test_a_plain_backward_under_a_loss_scale_is_refused() -> None:
    model = make_model()
    opt = gradaccum.wrap(torch.optim.SGD(model.parameters(), lr=0.5), steps=4, loss_scale=1024.0)
    loss_of(model).backward()
    with pytest.raises(gradaccum.UsageError, match=r"opt\.backward\(loss\)"):
        opt.step()
    assert opt.result.micro_step == 0
    opt.discard()
    opt.backward(loss_of(model))
    loss_of(model).backward()
    with pytest.raises(gradaccum.UsageError, match=r"opt\.backward\(loss\)"):
        opt.step()


@pytest.mark.parametrize("options", [{"steps": 2}, {"steps": None}, {"steps": 1, "clip_norm": 1.0}, {"steps": 1, "loss_scale": 2.0}])
def test_a_closure_is_refused_where_it_cannot_work(options: dict) -> None:
    model = make_model()
    opt = gradaccum.wrap(torch.optim.SGD(model.parameters(), lr=0.5), **options)
    called: list[int] = []
    with pytest.raises(gradaccum.UsageError, match="steps=1"):
        opt.step(lambda: called.append(1))
    assert not called


@pytest.mark.parametrize("steps", [lambda step: 0, lambda step: None, lambda step: 1.5, lambda step: True])
def test_a_schedule_that_gives_no_size_is_refused_at_step(steps: object) -> None:
    model = make_model()
    opt = gradaccum.wrap(torch.optim.SGD(model.parameters(), lr=0.5), steps=steps)
    loss_of(model).backward()
    with pytest.raises(gradaccum.GradAccumError, match=r"steps\(0\)"):
        opt.step()


def test_wrong_objects_are_refused() -> None:
    opt = gradaccum.wrap(torch.optim.SGD(make_model().parameters(), lr=0.5), steps=2)
    with pytest.raises(gradaccum.ArgumentTypeError, match="wrapped"):
        gradaccum.wrap(opt, steps=2)
    with pytest.raises(gradaccum.ArgumentTypeError, match="optimizer"):
        gradaccum.wrap(nn.Linear(1, 1), steps=2)
    with pytest.raises(gradaccum.ArgumentTypeError, match="steps"):
        gradaccum.wrap(torch.optim.SGD(make_model().parameters(), lr=0.5))
    with pytest.raises(gradaccum.ArgumentTypeError, match="foo"):
        gradaccum.wrap(torch.optim.SGD(make_model().parameters(), lr=0.5), steps=2, foo=1)
    with pytest.raises(gradaccum.ArgumentTypeError, match="loss"):
        opt.backward(3.0)
    with pytest.raises(gradaccum.ArgumentValueError, match="weight"):
        opt.backward(loss_of(make_model()), weight=-1)


@pytest.mark.parametrize("dtype", ["int32", torch.int64, "no_such_dtype", 32])
def test_an_accumulate_dtype_that_is_none_is_refused(dtype: object) -> None:
    with pytest.raises(gradaccum.GradAccumError, match="accumulate_dtype"):
        gradaccum.wrap(torch.optim.SGD(make_model().parameters(), lr=0.5), steps=2, accumulate_dtype=dtype)


def test_a_step_without_a_backward_is_named_as_such() -> None:
    model = make_model()
    opt = gradaccum.wrap(torch.optim.SGD(model.parameters(), lr=0.5), steps=2, loss_scale=8.0)
    with pytest.raises(gradaccum.UsageError, match=r"step\(\) without opt\.backward"):
        opt.step()
    opt.backward(loss_of(model), weight=0)
    opt.step()
    assert opt.result.micro_step == 1


def test_a_closure_in_half_precision_is_told_the_dtype() -> None:
    model = make_model().to(torch.bfloat16)
    opt = gradaccum.wrap(torch.optim.LBFGS(model.parameters(), max_iter=2), steps=1)
    with pytest.raises(gradaccum.UsageError, match=r"write accumulate_dtype=torch\.bfloat16"):
        opt.step(lambda: None)
    opt = gradaccum.wrap(torch.optim.LBFGS(model.parameters(), max_iter=2), steps=1, accumulate_dtype=torch.bfloat16)

    def closure() -> torch.Tensor:
        model.zero_grad()
        loss = model(torch.ones(1, 3, dtype=torch.bfloat16)).square().sum()
        loss.backward()
        return loss

    before = closure().item()
    opt.step(closure)
    assert opt.result.applied
    assert closure().item() < before


SCALES = {"none": {}, "static": {"loss_scale": 8.0}, "scaler": {"loss_scale": torch.amp.GradScaler("cpu", init_scale=8.0)}}


@pytest.mark.parametrize("options", SCALES.values(), ids=SCALES)
def test_backward_under_no_grad_works_as_in_torch(options: dict) -> None:
    models = make_model(), make_model()
    for model, around in zip(models, (torch.no_grad, torch.enable_grad), strict=True):
        opt = gradaccum.wrap(torch.optim.SGD(model.parameters(), lr=0.5), steps=1, **options)
        loss = loss_of(model)
        with around():
            opt.backward(loss, weight=3)
        opt.step()
        loss = loss_of(model)
        with around():
            opt.scale(loss).backward()
        opt.step()
        assert opt.result.optimizer_step == 2
    assert all(torch.equal(p, q) for p, q in zip(*(model.parameters() for model in models), strict=True))


@pytest.mark.parametrize("options", [{}, {"loss_scale": gradaccum.DynamicLossScale()}, {"master_weights": True}], ids=str)
def test_a_weight_beyond_a_half_loss_is_refused(options: dict) -> None:
    """Autograd hands it on in the dtype of the loss, where it is inf; in a float32 loss it is a number."""
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


@pytest.mark.parametrize("scale", [gradaccum.DynamicLossScale, lambda: torch.amp.GradScaler("cpu")], ids=["dynamic", "scaler"])
def test_a_scale_that_can_back_off_from_a_half_loss_is_not_refused(scale: Callable[[], object]) -> None:
    """The default of 2^16 is beyond float16 by a little, which costs one window."""
    parameter = torch.ones(2, dtype=torch.float16, requires_grad=True)
    opt = gradaccum.wrap(torch.optim.SGD([parameter], lr=0.5), steps=1, loss_scale=scale())
    for _ in range(2):
        opt.backward(parameter.mean())
        opt.step()
    assert opt.result.applied


def test_the_messages_name_what_works_for_gradients_of_ones_own_and_for_another_backward() -> None:
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
    with pytest.raises(gradaccum.UsageError, match=r"torch\.autograd\.backward\(parameters, gradients\)"):
        opt.step()
