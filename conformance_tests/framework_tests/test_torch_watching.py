"""Listeners of a wrapped torch optimizer, and its `repr`."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import pytest
import torch

import gradaccum
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


def test_a_raising_listener_under_a_scaler() -> None:
    """The window of ``scaler.step`` is closed, the scale has moved, and the loop can go
    on.
    """
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
    assert window.loss == pytest.approx(loss_of(weight, X).item(), rel=1e-14), (
        "the window has heard it before"
    )


def test_copies_and_states_have_no_listeners() -> None:
    weight, opt, heard = made(steps=1)
    for copied in (copy.deepcopy(opt), pickle.loads(pickle.dumps(opt))):
        micro_batch(copied.param_groups[0]["params"][0], copied, X)
    other = made(steps=1)[1]
    other.load_state_dict(opt.state_dict())
    assert not heard
    micro_batch(weight, opt, X)
    assert len(heard) == 1


def test_repr_is_one_line() -> None:
    weight, opt, _ = made(clip_norm=1.0, loss_scale=gradaccum.DynamicLossScale())
    assert (
        repr(opt)
        == "AccumulatingOptimizer(SGD, steps=2, clip_norm=1.0, loss_scale=dynamic |"
        " micro-batch 0 of 2, update 0, scale 65536)"
    )
    micro_batch(weight, opt, X * math.inf)
    micro_batch(weight, opt, X)
    micro_batch(weight, opt, X)
    assert str(opt).endswith("| micro-batch 1 of 2, update 0, 1 skipped, scale 32768)")
    assert "lr: 0.1" in repr(opt.optimizer)
    weight, opt, _ = made(steps=[(0, 1), (1, 3)])
    micro_batch(weight, opt, X)
    assert "micro-batch 0 of 3, update 1" in repr(opt)
    weight, opt, _ = made(steps=gradaccum.until_weight(128))
    micro_batch(weight, opt, X)
    assert "steps=until_weight(128) | micro-batch 1, weight 6 of 128" in repr(opt)
    opt = made(steps=lambda step: 1 if step == 0 else 0)[1]
    assert "steps=<lambda> | micro-batch 0 of 1" in repr(opt), "nothing raises"
