"""``separate_sums=True``: between two steps ``.grad`` is the user's. Loops that the
default refuses equal the large batch.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

from .torch_model import MAKERS, large_batch_step, loss_of, make, rows_of, values

MOMENTUM = MAKERS["sgd_momentum"]


def wrapped(place: str = "separate", **options: Any) -> tuple[nn.Module, Any]:
    return make(place, dtype=torch.float64, **{"inner": MOMENTUM, **options})


def assert_large(model: nn.Module, updates: int) -> None:
    expected = large_batch_step(MOMENTUM, updates, torch.float64)
    torch.testing.assert_close(values(model), expected, rtol=1e-13, atol=1e-13)


# Loops, by what they do with a micro-batch.


def no_clear(model: nn.Module, opt: Any, index: int) -> None:
    loss_of(model, rows_of(index % 4)).backward()
    opt.step()


def after_clear(model: nn.Module, opt: Any, index: int) -> None:
    no_clear(model, opt, index)
    model.zero_grad(set_to_none=False)


def before_clear(model: nn.Module, opt: Any, index: int) -> None:
    model.zero_grad()
    no_clear(model, opt, index)


def logged_norm(model: nn.Module, opt: Any, index: int) -> None:
    loss_of(model, rows_of(index % 4)).backward()
    clip_grad_norm_(model.parameters(), float("inf"))
    opt.step()
    model.zero_grad()


def assigned(model: nn.Module, opt: Any, index: int) -> None:
    """The loop goes on to use the tensors that it assigned."""
    parameters = list(model.parameters())
    gradients = torch.autograd.grad(loss_of(model, rows_of(index % 4)), parameters)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    opt.step()
    for gradient in gradients:
        gradient.fill_(float("nan"))


def polluted(model: nn.Module, opt: Any, index: int) -> None:
    """As a discriminator, through which the generator's loss goes after its own
    step.
    """
    opt.zero_grad()
    no_clear(model, opt, index)
    (1e3 * loss_of(model)).backward()


LOOPS = [before_clear, logged_norm, assigned, no_clear, after_clear, polluted]


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("on_overflow", ["skip_window", "drop_micro_batch"])
def test_loop_equals_large_batch(
    loop: Callable[[nn.Module, Any, int], None], on_overflow: str
) -> None:
    model, opt = wrapped(on_overflow=on_overflow)
    for index in range(12):
        loop(model, opt, index)
    assert_large(model, 3)
    assert opt.result.optimizer_step == 3


# What is in ``.grad`` beside the window.


@pytest.mark.parametrize("places", [("separate", "in .grad"), ("in .grad", "separate")])
def test_checkpoint_in_mid_window(places: tuple[str, str]) -> None:
    """The sum is saved as ever: either kind loads the other's, as a copy."""
    (model, opt), (fresh, other) = (wrapped(place) for place in places)
    for index in range(6):
        no_clear(model, opt, index)
    state = opt.state_dict()
    sums = state["gradaccum"]["sums"]
    before = copy.deepcopy(sums)
    fresh.load_state_dict(model.state_dict())
    other.load_state_dict(state)
    assert other.result[:3] == (False, False, False)
    for index in range(6, 8):
        no_clear(fresh, other, index)
    assert_large(fresh, 2)
    assert all(torch.equal(sums[key], before[key]) for key in before)
