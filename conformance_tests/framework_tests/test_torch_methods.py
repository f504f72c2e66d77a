"""The inner optimizer's methods, called on the wrapper: one that reads or writes the window's sum is refused, any other passes."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch", reason="needs PyTorch")

import torch
from torch import nn

import gradaccum
from conformance_tests.framework_tests.torch_model import loss_of, make_model, rows_of


class SAM(torch.optim.SGD):
    """Two updates a batch: up the gradient, and down with the gradient found there (Foret et al., 2021), as published code has it."""

    @torch.no_grad()
    def first_step(self, zero_grad: bool = False) -> None:
        held = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in held]).norm()
        for p in held:
            self.state[p]["old"] = p.data.clone()
            p.add_(p.grad, alpha=0.05 / float(norm))
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def second_step(self, zero_grad: bool = False) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.data = self.state[p]["old"]
        self.step()
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
    return model, gradaccum.wrap(SAM(model.parameters(), lr=0.5), **{"steps": 2, **options})


@pytest.mark.parametrize("options", [{}, {"steps": 1}, {"on_overflow": "drop_micro_batch"}, {"accumulate_dtype": "float64"}], ids=str)
@pytest.mark.parametrize("method", ["first_step", "forget"])
def test_method_touching_the_sum_is_refused(options: dict[str, Any], method: str) -> None:
    model, opt = make(**options)
    before = [p.detach().clone() for p in model.parameters()]
    loss_of(model, rows_of(0)).backward()
    with pytest.raises(gradaccum.UsageError, match=method):
        getattr(opt, method)()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    opt.step()
    assert opt.result.micro_step == opt.optimizer.describe() - opt.result.applied, "nothing of the micro-batch was lost"


def test_method_is_refused_in_open_window() -> None:
    model, opt = make()
    loss_of(model, rows_of(0)).backward()
    opt.step()
    with pytest.raises(gradaccum.UsageError, match="first_step"):
        opt.first_step(zero_grad=True)
    with pytest.raises(gradaccum.UsageError, match="forget"):
        opt.forget()


def test_method_with_its_own_backward_is_refused() -> None:
    """Between two windows the method begins a micro-batch and then reads its gradient."""
    model, opt = make()
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(gradaccum.UsageError, match="with_gradients_of"):
        opt.with_gradients_of(loss_of(model))
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


def test_harmless_method_passes() -> None:
    model, opt = make()
    loss_of(model, rows_of(0)).backward()
    assert opt.describe() == 1
    assert opt.describe.__name__ == "describe"
    opt.step()
    assert opt.describe() == 1


class Ascent(torch.optim.Optimizer):
    """SAM's first step as an optimizer of its own, which can be wrapped."""

    def __init__(self, sam: SAM) -> None:
        super().__init__([{"params": group["params"]} for group in sam.param_groups], {})
        self._sam = sam

    def step(self, closure: None = None) -> None:
        self._sam.first_step()


class Descent(Ascent):
    """SAM's second step."""

    def step(self, closure: None = None) -> None:
        self._sam.second_step()


def test_one_wrapper_per_update_is_exact() -> None:
    """The refusal recommends this: one window goes up, a second one over the same micro-batches goes down."""
    model, large = make_model(), make_model()
    sam, reference = SAM(model.parameters(), lr=0.5), SAM(large.parameters(), lr=0.5)
    up, down = (gradaccum.wrap(optimizer, steps=4) for optimizer in (Ascent(sam), Descent(sam)))
    for _ in range(2):
        for opt in (up, down):
            for index in range(4):
                opt.zero_grad()
                loss_of(model, rows_of(index)).backward()
                opt.step()
            assert opt.result.applied
        loss_of(large).backward()
        reference.first_step(zero_grad=True)
        loss_of(large).backward()
        reference.second_step(zero_grad=True)
    for p, q in zip(model.parameters(), large.parameters(), strict=True):
        torch.testing.assert_close(p, q)
