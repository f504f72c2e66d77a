"""The loss of a window that goes on elsewhere: from a state, a checkpoint of torch, a copy or a pickle."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs PyTorch")

import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from conformance_tests.framework_tests.torch_window_loss import X, feed, loss_of, made, near


def through_state(model: Any, opt: Any) -> tuple[Any, Any]:
    other, resumed = made()
    resumed.load_state_dict(copy.deepcopy(opt.state_dict()))
    return other, resumed


def through_checkpoint(model: Any, opt: Any) -> tuple[Any, Any]:
    other, resumed = made()
    set_optimizer_state_dict(other, resumed, get_optimizer_state_dict(model, opt))
    return other, resumed


def through_copy(model: Any, opt: Any) -> tuple[Any, Any]:
    return copy.deepcopy((model, opt))


def through_pickle(model: Any, opt: Any) -> tuple[Any, Any]:
    loaded: tuple[Any, Any] = pickle.loads(pickle.dumps((model, opt)))
    return loaded


@pytest.mark.parametrize("way", [through_state, through_checkpoint, through_copy, through_pickle])
def test_goes_on_elsewhere(way: Callable[..., tuple[Any, Any]]) -> None:
    """In mid-window, and the last closed window's."""
    model, opt = made()
    feed(model, opt, X[:2], X[2:], X[:3])
    other, resumed = way(model, opt)
    assert resumed.result.loss == opt.result.loss
    with torch.no_grad():
        other.weight.copy_(model.weight)
    expected = near(model)
    feed(other, resumed, X[3:])
    assert resumed.result.loss == expected


def test_copy_in_the_midst_of_a_micro_batch() -> None:
    model, opt = made()
    feed(model, opt, X[:3])
    opt.backward(loss_of(model, X[3:]), weight=3)
    resumed = through_copy(model, opt)[1]
    resumed.step()
    assert resumed.result.loss == near(model)
