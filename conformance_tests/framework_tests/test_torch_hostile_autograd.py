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
from conformance_tests.framework_tests.torch_model import (
    MAKERS,
    loss_of,
    make_model,
    rows_of,
    values,
)

MODES: dict[str, dict[str, Any]] = {
    "in grad": {},
    "apart": {"separate_sums": True},
    "dropping": {"on_overflow": "drop_micro_batch"},
    "moving": {"accumulate_dtype": "float64"},
}
Scenario = Callable[[nn.Module, int], None]
"""One backward pass of a micro-batch, whatever happens in it."""


def run(options: dict[str, Any] | None, scenario: Scenario) -> list[Tensor]:
    """The update of one window; without options, that of bare torch, whose
    micro-batches are added by hand.
    """
    model = make_model()
    before = values(model)
    opt: Any = MAKERS["sgd"](model.parameters())
    if options is not None:
        opt = gradaccum.wrap(opt, steps=4, **options)
    total = list(map(torch.zeros_like, before))
    for index in range(4):
        scenario(model, index)
        if options is None:
            for each, p in zip(total, model.parameters(), strict=True):
                each += 0 if p.grad is None else 0.5 * p.grad / 4
        else:
            opt.step()
        opt.zero_grad()
    if options is None:
        return total
    return [b - p.detach() for b, p in zip(before, model.parameters(), strict=True)]


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
    taken: dict[Tensor, Any] = {}

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


@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("mode", MODES)
def test_update_is_bare_torch_s(scenario: str, mode: str) -> None:
    if scenario in REFUSED and mode != "apart":
        with pytest.raises(gradaccum.UsageError, match="separate_sums=True"):
            run(MODES[mode], SCENARIOS[scenario])
        return
    mine, theirs = (
        run(options, SCENARIOS[scenario]) for options in (MODES[mode], None)
    )
    torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)
