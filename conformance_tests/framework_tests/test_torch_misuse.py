"""What the wrapped optimizer refuses, by name, with what was accumulated before it still there."""

from __future__ import annotations

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
