"""The loss of a window, from whatever tells it, through errors and interrupts; NaN where a part of it is not known."""

from __future__ import annotations

import math
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs PyTorch")

import torch
from torch import Tensor

import gradaccum
import gradaccum_torch
from conformance_tests.framework_tests.torch_window_loss import X, feed, loss_of, made, near


def test_plain_backward_tells_nothing() -> None:
    """Beside ``opt.backward`` too: the loss of the window would lack a part."""
    model, opt = made()
    for mixed in (False, True):
        for _ in range(2):
            loss_of(model).backward()
            if mixed:
                opt.backward(loss_of(model))
            opt.step()
            opt.zero_grad()
        assert math.isnan(opt.result.loss)
    before = near(model)
    feed(model, opt, X[:2], X[2:])
    assert opt.result.loss == before, "the next window knows its own"


@pytest.mark.parametrize("way", ["scale", "two losses", "closure", "closure and backward", "number"])
def test_each_way_to_tell(way: str) -> None:
    model, opt = made(loss_scale=4.0 if way == "scale" else None)
    expected = near(model)

    def closure(rows: Tensor) -> Any:
        opt.zero_grad()
        loss = loss_of(model, rows)
        if way == "closure and backward":
            opt.backward(loss)
            return None
        loss.backward()
        return loss.item() if way == "number" else loss

    for rows in X.split(3):
        if way == "scale":
            opt.scale(loss_of(model, rows)).backward()
            opt.step()
        elif way == "two losses":
            for half in rows[:1], rows[1:]:
                opt.backward(loss_of(model, half) * len(half) / 3)
            opt.step()
        else:
            opt.step(lambda rows=rows: closure(rows))
    assert opt.result.loss == expected


def test_closure_that_returns_something_else() -> None:
    model, opt = made(steps=1)
    for returned in (None, "loss", torch.ones(2), True):
        opt.step(lambda returned=returned: loss_of(model).backward() or returned)
        assert opt.result.applied
        assert math.isnan(opt.result.loss)


def test_what_is_dropped_is_not_in_it() -> None:
    model, opt = made(steps=1, separate_sums=True)
    opt.backward(loss_of(model) * 100)
    opt.zero_grad()
    expected = near(model)
    feed(model, opt, X)
    assert opt.result.loss == expected
    opt.discard()
    assert opt.result.loss == expected, "the last closed window's"
    model, opt = made()
    feed(model, opt, X[:1])
    opt.discard()
    feed(model, opt, X[:3], X[3:])
    assert opt.result.loss == near(made()[0])


def test_errors_on_the_way() -> None:
    """A backward pass that raises tells nothing, and an update that raises and is made later tells its window's loss once."""
    model, opt = made()
    expected = near(model)
    feed(model, opt, X[:3])

    def fail(*_: object) -> None:
        raise OSError("interrupted")

    handle = opt.register_step_pre_hook(fail)
    with pytest.raises(OSError, match="interrupted"):
        feed(model, opt, X[3:])
    assert math.isnan(opt.result.loss)
    handle.remove()
    opt.flush()
    assert opt.result.loss == expected
    with pytest.raises(RuntimeError):
        opt.backward(torch.zeros(()))
    expected = near(model)
    feed(model, opt, X[:3], X[3:])
    assert opt.result.loss == expected


def test_interrupt_that_loses_a_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """The micro-batch is counted, and its loss is not: the window's is not known, rather than too small."""
    model, opt = made(steps=3)
    feed(model, opt, X[:2])

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(opt._window._statistics, "counted", interrupt)
        with pytest.raises(KeyboardInterrupt):
            feed(model, opt, X[2:4])
    opt.zero_grad()
    feed(model, opt, X[4:])
    assert opt.result.applied
    assert math.isnan(opt.result.loss)
    expected = near(model)
    feed(model, opt, X[:2], X[2:4], X[4:])
    assert opt.result.loss == expected


def test_large_batch_in_one_call() -> None:
    model, opt = made(steps=None)
    loss = gradaccum_torch.backward(lambda rows: loss_of(model, rows), X, steps=4, optimizer=opt)
    assert opt.result.loss == pytest.approx(loss.item(), rel=1e-13)
    covariance = gradaccum_torch.coupled_backward(model, lambda z: (z - z.mean(0)).square().sum(), X, steps=3, optimizer=opt)
    assert opt.result.loss == pytest.approx(covariance.item(), rel=1e-13)


def test_incoming_gradient_multiplies_the_loss() -> None:
    model, opt = made()
    expected = 0.5 * loss_of(model).item()
    for _ in range(2):
        opt.backward(loss_of(model), gradient=torch.tensor(0.5))
        opt.step()
    assert opt.result.loss == pytest.approx(expected)


@pytest.mark.parametrize("steps", [1, 2])
def test_plain_backward_before_a_closure(steps: int) -> None:
    """The closure's loss is a part of the micro-batch's."""
    model, _ = made()
    opt = gradaccum.wrap(torch.optim.SGD(model.parameters(), lr=0.0), steps=steps)

    def closure() -> Tensor:
        loss = loss_of(model)
        loss.backward()
        return loss

    for _ in range(steps):
        loss_of(model).backward()
        opt.step(closure)
    assert opt.result.applied
    assert math.isnan(opt.result.loss)
