"""Listeners of a wrapped torch optimizer, and its `repr`."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import pytest

import gradaccum
from conformance_tests.framework_tests.torch_model import loss_of, make
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
    for factor in (math.inf, 1.0, 1.0):
        opt.backward(loss_of(model) * factor)
        opt.step()
    assert (
        str(opt)
        == "AccumulatingOptimizer(SGD, steps=2, clip_norm=1.0, loss_scale=dynamic |"
        " micro-batch 1 of 2, update 0, 1 skipped, scale 32768)"
    )
