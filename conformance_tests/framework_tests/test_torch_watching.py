"""Listeners of a wrapped torch optimizer, and its `repr`."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import pytest

import gradaccum
from conformance_tests.framework_tests.torch_model import loss_of, make, train
from gradaccum.watching import ClosedWindow


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda run: pickle.loads(pickle.dumps(run))]
)
def test_a_listener_that_comes_in_mid_window(copied: Any) -> None:
    """A copy has no listeners; its own one hears of the whole window."""
    model, opt = make(steps=2)
    heard, late = list[ClosedWindow](), list[ClosedWindow]()
    opt.add_listener(heard.append)
    opt.backward(loss_of(model, slice(0, 3)), weight=3)
    opt.step()
    other_model, other = copied((model, opt))
    other.add_listener(late.append)
    other.backward(loss_of(other_model, slice(3, 8)), weight=5)
    other.step()
    (window,) = late
    assert (window.micro_batches, window.weight) == (2, 8)
    assert window.loss == pytest.approx(loss_of(model).item(), rel=1e-6)
    assert not heard


def test_repr_is_one_line() -> None:
    model, opt = make(steps=2, clip_norm=1.0, loss_scale=gradaccum.DynamicLossScale())
    assert (
        repr(opt)
        == "AccumulatingOptimizer(SGD, steps=2, clip_norm=1.0, loss_scale=dynamic |"
        " micro-batch 0 of 2, update 0, scale 65536)"
    )
    for factor in (math.inf, 1.0, 1.0):
        opt.backward(loss_of(model) * factor)
        opt.step()
    assert str(opt).endswith("| micro-batch 1 of 2, update 0, 1 skipped, scale 32768)")
    assert "lr: 0.5" in repr(opt.optimizer)
    model, opt = make(steps=[(0, 1), (1, 3)])
    train(model, opt, 1)
    assert "micro-batch 0 of 3, update 1" in repr(opt)
    model, opt = make(steps=gradaccum.until_weight(128))
    opt.backward(loss_of(model), weight=6)
    opt.step()
    assert "steps=until_weight(128) | micro-batch 1, weight 6 of 128" in repr(opt)
    _, opt = make(steps=lambda step: 1 if step == 0 else 0)
    assert "steps=<lambda> | micro-batch 0 of 1" in repr(opt), "nothing raises"
