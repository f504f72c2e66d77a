"""A user's function that runs a backward pass itself, or moves buffers, in a call with the large batch: refused by name, or set back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs PyTorch")

import torch
from torch import Tensor, nn

import gradaccum
from conformance_tests.framework_tests.torch_large_batch import X, make_model
from gradaccum_torch.large_batch import backward, coupled_backward


def variance(outputs: Tensor) -> Tensor:
    return outputs.std(0).sum()


def assert_refused(model: nn.Module, call: Callable[[], Any], own: str) -> None:
    with pytest.raises(gradaccum.UsageError, match=own):
        call()
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("temperature", [False, True])
def test_coupled_loss_that_runs_backward(wrapped: bool, temperature: bool) -> None:
    """It would leave a gradient in the outputs, and in a parameter of its own, beside the call's."""
    model, t = make_model(), nn.Parameter(torch.tensor(2.0, dtype=torch.float64))
    options = {"optimizer": gradaccum.wrap(torch.optim.SGD([*model.parameters(), t], lr=0.1), steps=None)} if wrapped else {}

    def loss_fn(outputs: Tensor) -> Tensor:
        loss = variance(outputs) * (t if temperature else 1.0)
        loss.backward(retain_graph=True)
        return loss

    assert_refused(model, lambda: coupled_backward(model, loss_fn, X, steps=3, **options), "backward")


@pytest.mark.parametrize("wrapped", [False, True])
def test_outputs_that_run_backward(wrapped: bool) -> None:
    """The second pass has a graph, so there it is possible."""
    model = make_model()
    options = {"optimizer": gradaccum.wrap(torch.optim.SGD(model.parameters(), lr=0.1), steps=None)} if wrapped else {}

    def outputs_fn(x: Tensor) -> Tensor:
        z = model(x)
        if z.requires_grad:
            z.sum().backward(retain_graph=True)
        return z

    assert_refused(model, lambda: coupled_backward(outputs_fn, variance, X, steps=3, **options), "backward")


def test_backward_into_another_module_beside_a_window() -> None:
    """A critic that the window does not sum over gets the large batch's gradient beside it."""
    model, critic = make_model(), nn.Linear(3, 1, dtype=torch.float64)
    opt = gradaccum.wrap(torch.optim.SGD(model.parameters(), lr=0.1), steps=None)

    def loss_fn(x: Tensor) -> Tensor:
        loss = critic(model(x)).mean()
        loss.backward(retain_graph=True, inputs=list(critic.parameters()))
        return loss

    assert_refused(critic, lambda: backward(loss_fn, X, steps=2, optimizer=opt), "backward")
    assert opt.result.micro_step == 0


class Drifting(nn.Module):
    """The output depends on a buffer that every call replaces."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 2, dtype=torch.float64)
        self.register_buffer("calls", torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        self.calls = self.calls + 1
        return self.inner(x) * self.calls


def test_replaced_buffer_in_both_passes() -> None:
    """Micro-batch i finds the buffer as in one pass over the micro-batches, and the buffer ends as after that pass."""
    torch.manual_seed(0)
    model = Drifting()
    factors = torch.arange(1.0, 6, dtype=torch.float64).repeat_interleave(2)[:, None]
    expected = torch.autograd.grad(variance(model.inner(X) * factors), list(model.inner.parameters()))
    coupled_backward(model, variance, X, steps=5)
    for p, q in zip(model.inner.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad, q, rtol=1e-13, atol=1e-13)
    assert float(model.calls) == 5


def test_error_puts_the_replaced_buffer_back() -> None:
    """The very tensor: somebody else may hold it."""
    model = Drifting()
    held = model.calls

    def loss_fn(x: Tensor) -> Tensor:
        if float(model(x).detach().sum()) and float(model.calls) == 3:
            raise ZeroDivisionError
        return model(x).sum()

    with pytest.raises(ZeroDivisionError):
        backward(loss_fn, X, steps=5)
    assert model.calls is held
    assert float(held) == 0


def test_half_gradients_are_left_to_autograd_after_the_call() -> None:
    """Nothing of the call takes what a later plain backward pass delivers."""
    weight = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    backward(lambda x: (x * weight).sum(), torch.ones(4, 2, dtype=torch.bfloat16), steps=2)
    weight.grad = None
    (weight * 3).sum().backward()
    assert torch.equal(weight.grad, torch.full_like(weight, 3.0))
