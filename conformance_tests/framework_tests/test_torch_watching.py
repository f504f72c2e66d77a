"""Listeners of a wrapped torch optimizer, and its `repr`."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs PyTorch")

import torch

import gradaccum
import gradaccum_torch
from gradaccum.watching import ClosedWindow

X = torch.arange(12.0, dtype=torch.float64).reshape(6, 2) / 10


def made(**options: Any) -> tuple[Any, Any, list[ClosedWindow]]:
    """A parameter, its wrapped optimizer and what that one's listener hears."""
    weight = torch.nn.Parameter(torch.tensor([1.0, -1.0], dtype=torch.float64))
    opt = gradaccum.wrap(torch.optim.SGD([weight], lr=0.1), **{"steps": 2, **options})
    heard: list[ClosedWindow] = []
    opt.add_listener(heard.append)
    return weight, opt, heard


def loss_of(weight: Any, rows: Any) -> Any:
    return ((rows @ weight) ** 2).mean()


def micro_batch(weight: Any, opt: Any, rows: Any) -> None:
    opt.backward(loss_of(weight, rows), weight=len(rows))
    opt.step()
    opt.zero_grad()


def test_hears_the_large_batch() -> None:
    weight, opt, heard = made()
    expected = loss_of(weight, X[:5])
    (gradient,) = torch.autograd.grad(expected, weight)
    micro_batch(weight, opt, X[:3])
    assert not heard, "nothing in mid-window"
    micro_batch(weight, opt, X[3:5])
    (window,) = heard
    assert (window.optimizer_step, window.applied, window.skipped, window.overflow) == (1, True, False, False)
    assert (window.weight, window.micro_batches, window.loss_scale) == (5, 2, 1)
    assert window.loss == pytest.approx(expected.item(), rel=1e-14)
    assert window.grad_norm == pytest.approx(gradient.norm().item(), rel=1e-14)
    assert 0 < window.seconds < 60
    assert all(type(value) in (int, float, bool) for value in window)


def test_flush_is_heard_and_discard_is_not() -> None:
    weight, opt, heard = made(steps=4)
    micro_batch(weight, opt, X[:3])
    opt.discard()
    assert not heard
    expected = loss_of(weight, X[3:]).item()
    micro_batch(weight, opt, X[3:])
    opt.flush()
    opt.flush()
    (window,) = heard
    assert (window.micro_batches, window.weight, window.loss) == (1, 3, pytest.approx(expected, rel=1e-14))


def test_skipped_windows_are_heard() -> None:
    weight, opt, heard = made(skip_norm=1e-9)
    for rows in (X[:3], X[3:]):
        micro_batch(weight, opt, rows)
    assert [(w.applied, w.skipped, w.overflow, w.optimizer_step) for w in heard] == [(False, True, False, 0)]
    weight, opt, heard = made(loss_scale=gradaccum.DynamicLossScale(init_scale=2.0**8))
    for rows in (X[:3] * math.inf, X[3:]):
        micro_batch(weight, opt, rows)
    assert [(w.skipped, w.overflow, w.grad_norm, w.loss_scale) for w in heard] == [(True, True, math.inf, 2.0**7)]


def test_dropped_micro_batch_is_not_in_the_loss() -> None:
    weight, opt, heard = made(on_overflow="drop_micro_batch")
    expected = loss_of(weight, X[3:]).item()
    for rows in (X[:3] * math.inf, X[3:]):
        micro_batch(weight, opt, rows)
    (window,) = heard
    assert (window.applied, window.overflow, window.weight) == (True, True, 3)
    assert window.loss == pytest.approx(expected, rel=1e-14)


@pytest.mark.parametrize("call", ["step", "flush"])
def test_a_raising_listener_loses_nothing(call: str) -> None:
    def fail(window: ClosedWindow) -> None:
        raise OSError("full disk")

    (weight, opt, heard), (quiet, other, _) = made(steps=None), made(steps=None)
    if call == "step":
        (weight, opt, heard), (quiet, other, _) = made(), made()
    handle = opt.add_listener(fail)
    micro_batch(quiet, other, X[:3])
    micro_batch(weight, opt, X[:3])
    for w, o in ((quiet, other), (weight, opt)):
        o.backward(loss_of(w, X[3:]), weight=3)
    ends: Callable[[], object] = opt.step
    if call == "flush":
        opt.step()
        ends = opt.flush
    with pytest.raises(OSError, match="full disk"):
        ends()
    other.step()
    other.flush()
    assert torch.equal(weight, quiet)
    assert (opt.result.applied, opt.result.micro_step, opt.result.optimizer_step) == (True, 0, 1)
    assert len(heard) == 1, "the other listener heard of it"
    handle.remove()
    opt.zero_grad()
    other.zero_grad()
    for w, o in ((quiet, other), (weight, opt)):
        for rows in (X[:3], X[3:]):
            micro_batch(w, o, rows)
        o.flush()
    assert torch.equal(weight, quiet)


def test_a_raising_listener_under_a_scaler() -> None:
    """The window of ``scaler.step`` is closed, the scale has moved, and the loop can go on."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=1)
    weight, opt, heard = made(steps=1, loss_scale=scaler)

    def fail(window: ClosedWindow) -> None:
        raise OSError("full disk")

    handle = opt.add_listener(fail)
    scaler.scale(loss_of(weight, X)).backward()
    with pytest.raises(OSError, match="full disk"):
        scaler.step(opt)
    assert (opt.result.optimizer_step, scaler.get_scale()) == (1, 2.0**9)
    handle.remove()
    opt.zero_grad()
    scaler.scale(loss_of(weight, X)).backward()
    scaler.step(opt)
    scaler.update()
    assert (opt.result.optimizer_step, scaler.get_scale()) == (2, 2.0**10)
    assert [w.loss_scale for w in heard] == [2.0**9, 2.0**10]
    assert math.isnan(heard[0].loss), "nobody told it"


def test_unknown_losses_are_nan() -> None:
    weight, opt, heard = made()
    for _ in range(2):
        loss_of(weight, X).backward()
        opt.step()
    micro_batch(weight, opt, X)
    loss_of(weight, X).backward()
    opt.step()
    assert [math.isnan(w.loss) for w in heard] == [True, True]
    assert [w.weight for w in heard] == [2, 7]


def test_a_listener_that_comes_in_mid_window() -> None:
    weight, opt, _ = made()
    micro_batch(weight, opt, X[:3])
    other = copy.deepcopy(opt)
    late: list[ClosedWindow] = []
    other.add_listener(late.append)
    own = other.param_groups[0]["params"][0]
    micro_batch(own, other, X[3:])
    (window,) = late
    assert (window.micro_batches, window.weight) == (2, 6)
    assert window.loss == pytest.approx(loss_of(weight, X).item(), rel=1e-14), "the window has heard it before"


def test_copies_and_states_have_no_listeners() -> None:
    weight, opt, heard = made(steps=1)
    for copied in (copy.deepcopy(opt), pickle.loads(pickle.dumps(opt))):
        micro_batch(copied.param_groups[0]["params"][0], copied, X)
    other = made(steps=1)[1]
    other.load_state_dict(opt.state_dict())
    assert not heard
    micro_batch(weight, opt, X)
    assert len(heard) == 1


def test_zero_grad_takes_the_loss_out() -> None:
    weight, opt, heard = made(steps=1, separate_sums=True)
    opt.backward(loss_of(weight, X[:3]) * 100)
    opt.zero_grad()
    expected = loss_of(weight, X).item()
    micro_batch(weight, opt, X)
    assert heard[0].loss == pytest.approx(expected, rel=1e-14)


def test_a_closure_and_two_losses() -> None:
    """Several losses of one micro-batch add up, as their gradients do."""
    weight, opt, heard = made(reduction="item_mean")

    def closure() -> Any:
        opt.backward(loss_of(weight, X[:3]), weight=3)
        opt.backward(loss_of(weight, X[3:]), weight=3)

    expected = (loss_of(weight, X[:3]) + loss_of(weight, X[3:])).item()
    opt.step(closure)
    opt.step(closure)
    assert heard[0].loss == pytest.approx(2 * expected / 6, rel=1e-14)


def test_the_large_batch_in_one_call_is_heard() -> None:
    model = torch.nn.Linear(2, 1, dtype=torch.float64)
    opt = gradaccum.wrap(torch.optim.SGD(model.parameters(), lr=0.1), steps=None)
    heard: list[ClosedWindow] = []
    opt.add_listener(heard.append)
    loss = gradaccum_torch.backward(lambda rows: model(rows).square().mean(), X, steps=3, optimizer=opt)
    (window,) = heard
    assert (window.micro_batches, window.weight) == (3, 6)
    assert window.loss == pytest.approx(loss.item(), rel=1e-14)


def test_any_loop_can_watch_the_result() -> None:
    weight, opt, heard = made()
    other: list[ClosedWindow] = []
    watch = gradaccum.Watch(other.append)
    for rows in X.split(1):
        loss = loss_of(weight, rows)
        opt.backward(loss)
        opt.step()
        watch(opt.result, loss=loss.detach())
    assert [w._replace(seconds=0.0) for w in other] == [w._replace(seconds=0.0) for w in heard]


def test_repr_is_one_line() -> None:
    weight, opt, _ = made(clip_norm=1.0, loss_scale=gradaccum.DynamicLossScale())
    assert repr(opt) == "AccumulatingOptimizer(SGD, steps=2, clip_norm=1.0, loss_scale=dynamic | micro-batch 0 of 2, update 0, scale 65536)"
    micro_batch(weight, opt, X * math.inf)
    micro_batch(weight, opt, X)
    micro_batch(weight, opt, X)
    assert str(opt).endswith("| micro-batch 1 of 2, update 0, 1 skipped, scale 32768)")
    assert "lr: 0.1" in repr(opt.optimizer)


def test_repr_asks_no_schedule_that_raises() -> None:
    weight, opt, _ = made(steps=[(0, 1), (1, 3)])
    micro_batch(weight, opt, X)
    assert "micro-batch 0 of 3, update 1" in repr(opt)
    opt = made(steps=lambda step: 1 if step == 0 else 0)[1]
    assert "steps=<lambda> | micro-batch 0 of 1" in repr(opt)
