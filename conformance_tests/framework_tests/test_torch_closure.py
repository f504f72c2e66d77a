"""``step(closure)``: a closure is run once and is a micro-batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs PyTorch")

import torch
from torch import Tensor

import gradaccum
from conformance_tests.framework_tests.torch_separate import (
    PARTS,
    X,
    Y,
    assert_same,
    closed_over,
    large,
    make_model,
    mse,
    wrapped,
)


def test_closure_runs_once_per_micro_batch() -> None:
    """By default too: Lightning hands one over in each step."""
    model = make_model()
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
    assert float(sum(losses).detach() / 4) == pytest.approx(float(mse(make_model(), X, Y).detach()))
    assert_same(model, large())


def test_closure_that_raises_counts_nothing() -> None:
    model = make_model()
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

    model = make_model()
    opt = gradaccum.wrap(Again(model.parameters(), lr=0.1), steps=2, separate_sums=True)
    closed_over(model, opt, *PARTS[0])
    with pytest.raises(RuntimeError, match="needs a closure") as caught:
        closed_over(model, opt, *PARTS[1])
    assert "used bare" in caught.value.__notes__[0]
    assert opt.result.micro_step == 2, "the window stays"


def _closure(model: torch.nn.Module, opt: Any, scale: float = 1.0, **weight: float) -> Callable[[], Tensor]:
    def closure() -> Tensor:
        opt.zero_grad()
        loss = mse(model, X, Y) * scale
        opt.backward(loss, **weight)
        return loss

    return closure


OPTIMIZERS = [torch.optim.SGD, torch.optim.AdamW]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_closure_that_overflows_skips_the_window(optimizer: type[torch.optim.Optimizer]) -> None:
    model = make_model()
    before, opt = [p.detach().clone() for p in model.parameters()], gradaccum.wrap(optimizer(model.parameters(), lr=0.1), steps=1)
    assert torch.isnan(opt.step(_closure(model, opt, float("nan"))))
    assert (opt.result.skipped, opt.result.overflow, opt.result.optimizer_step) == (True, True, 0)
    torch.testing.assert_close(list(model.parameters()), before, rtol=0, atol=0)
    assert all(p.grad is None for p in model.parameters())
    opt.step(_closure(model, opt))
    assert (opt.result.applied, opt.result.overflow) == (True, False)


@pytest.mark.parametrize("options", [{"steps": 1}, {"steps": 4, "separate_sums": True}], ids=str)
def test_optimizer_that_needs_a_closure_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(gradaccum.ArgumentTypeError, match=r"optimizer: .*LBFGS, whose step evaluates the model again"):
        gradaccum.wrap(torch.optim.LBFGS(make_model().parameters()), **options)
