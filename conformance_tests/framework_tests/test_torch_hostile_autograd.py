"""Backward passes that are not plain: hooks that replace, drop or delay a gradient,
and one gradient that all parameters share.

Each makes the large batch's gradient as bare torch makes it, or an error says which
change was seen.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradaccum

from .torch_model import by_float_place, loss_of, make, make_model, rows_of, values

Scenario = Callable[[nn.Module, int], None]
"""One backward pass of a micro-batch, whatever happens in it."""


def wrapped(place: str, scenario: Scenario) -> list[Tensor]:
    """How far one window moves the parameters."""
    model, opt = make(place)
    before = values(model)
    for index in range(4):
        scenario(model, index)
        opt.step()
        opt.zero_grad()
    return [p - q for p, q in zip(values(model), before, strict=True)]


def bare(scenario: Scenario) -> list[Tensor]:
    """The same by bare torch, whose micro-batches are added by hand."""
    model = make_model()
    total = list(map(torch.zeros_like, values(model)))
    for index in range(4):
        scenario(model, index)
        for each, p in zip(total, model.parameters(), strict=True):
            if p.grad is not None:
                each -= 0.5 * p.grad / 4
        model.zero_grad()
    return total


def hooked(hook: Callable[[Any], Any], *, after: bool) -> Scenario:
    """A pass with a hook on each parameter, `after` autograd has added to ``.grad`` or
    before.
    """

    def scenario(model: nn.Module, index: int) -> None:
        handles = [
            each.register_post_accumulate_grad_hook(hook)
            if after
            else each.register_hook(hook)
            for each in model.parameters()
        ]
        loss_of(model, rows_of(index)).backward()
        for handle in handles:
            handle.remove()

    return scenario


def delayed(model: nn.Module, index: int) -> None:
    """A hook takes the gradients away, and the loop gives them back after the pass, as
    a compressor does.
    """
    taken = {}

    def take(parameter: Tensor) -> None:
        taken[parameter], parameter.grad = parameter.grad, None

    hooked(take, after=True)(model, index)
    for parameter, gradient in taken.items():
        parameter.grad = gradient


def write(parameter: Tensor) -> None:
    if parameter.grad is not None:
        parameter.grad.mul_(3.0)


def drop(parameter: Tensor) -> None:
    parameter.grad = None


ONE = torch.ones(20)
SCENARIOS = {
    "replaced": hooked(lambda gradient: 3 * gradient, after=False),
    "one for all": hooked(
        lambda gradient: ONE[: gradient.numel()].view_as(gradient), after=False
    ),
    "delayed": delayed,
    "written after": hooked(write, after=True),
    "dropped after": hooked(drop, after=True),
}
REFUSED = {"written after", "dropped after"}
"""The changes of what autograd has added, which is right only where ``.grad`` is the
user's.
"""


@pytest.mark.parametrize("name", SCENARIOS)
@by_float_place
def test_update_is_bare_torch_s(name: str, place: str) -> None:
    scenario = SCENARIOS[name]
    if name in REFUSED and place != "separate":
        with pytest.raises(gradaccum.UsageError, match="separate_sums=True"):
            wrapped(place, scenario)
    else:
        torch.testing.assert_close(
            wrapped(place, scenario), bare(scenario), rtol=1e-5, atol=1e-5
        )
