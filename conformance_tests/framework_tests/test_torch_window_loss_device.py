"""Losses on an accelerator stay there until the window ends, or until somebody asks. Here tensors on the CPU stand for them."""

from __future__ import annotations

import copy
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs PyTorch")

import torch
from torch import Tensor

from conformance_tests.framework_tests.torch_operations import Operations
from conformance_tests.framework_tests.torch_window_loss import X, feed, loss_of, made
from gradaccum_torch import window as window_module
from gradaccum_torch.statistics import as_told

READ = "_local_scalar_dense"
"""The operation that waits for a device."""


@pytest.fixture
def on_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses stay tensors, as those on an accelerator do."""
    monkeypatch.setattr(window_module, "as_told", lambda loss: loss.detach().clone())


@pytest.mark.parametrize("options", [{}, {"on_overflow": "ignore"}, {"reduction": "sum"}, {"reduction": "item_mean"}], ids=str)
def test_losses_that_stay_on_their_device(on_device: None, options: dict[str, Any]) -> None:
    """They are read in the one transfer at the window's end; without one, when the result is asked for."""
    (model, opt), (other, plain) = made(**options), made(**options)
    feed(model, opt, X[:2], X[2:], X[:4])
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(window_module, "as_told", as_told)
        feed(other, plain, X[:2], X[2:], X[:4], X[4:])
    resumed = copy.deepcopy((model, opt))
    opt.backward(loss_of(model, X[4:]), weight=2)
    with Operations() as reads:
        opt.step()
    if options.get("on_overflow"):
        assert READ not in reads.names
    assert not opt._window._statistics.unread
    with Operations() as reads:
        loss, again = opt.result.loss, opt.result.loss
    assert reads.names.count(READ) == (1 if options.get("on_overflow") else 0), "the copy has read the other one"
    assert loss == again == pytest.approx(plain.result.loss, rel=1e-14)
    feed(*resumed, X[4:])
    assert resumed[1].result.loss == loss, "the copy has the losses of before"


def test_next_loss_takes_the_same_memory() -> None:
    """As in a captured CUDA graph, which writes every loss there."""

    class Elsewhere(Tensor):
        is_cpu = False  # type: ignore[assignment]

    loss = torch.tensor(3.0).as_subclass(Elsewhere)
    told = as_told(loss)
    loss.fill_(5.0)
    assert isinstance(told, Tensor)
    assert told.item() == 3.0
