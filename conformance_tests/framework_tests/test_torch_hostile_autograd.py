"""Backward passes that are not plain: hooks that replace, drop or delay a gradient,
custom functions that hand over strange tensors.

Each makes the large batch's gradient as bare torch makes it, or an error says which
change was seen.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function

import gradaccum
from conformance_tests.framework_tests.refusing import refused
from conformance_tests.framework_tests.torch_model import (
    MAKERS,
    loss_of,
    make_model,
    rows_of,
)
from gradaccum import UsageError

MODES: dict[str, dict[str, Any]] = {
    "in grad": {},
    "apart": {"separate_sums": True},
    "dropping": {"on_overflow": "drop_micro_batch"},
    "moving": {"accumulate_dtype": "float64"},
}
Scenario = Callable[[nn.Module, int], None]
"""One backward pass of a micro-batch, whatever happens in it."""


class Handed(Function):
    """A sum of all elements times a factor, whose gradient is one tensor for all
    parameters, made by `make`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        make: Callable[[Tensor, Tensor], Tensor],
        factor: Tensor,
        *parameters: Tensor,
    ) -> Tensor:
        ctx.make, ctx.factor, ctx.parameters = make, factor, parameters
        return factor * torch.stack([parameter.sum() for parameter in parameters]).sum()

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        return (
            None,
            None,
            *(
                ctx.make(parameter, ctx.factor * upstream[0])
                for parameter in ctx.parameters
            ),
        )


MEMORY: dict[object, Tensor] = {}


def static(parameter: Tensor, value: Tensor) -> Tensor:
    """In memory that the next micro-batch writes over."""
    key = (parameter.dtype, parameter.shape)
    memory = MEMORY.setdefault(key, torch.empty_like(parameter))
    return memory.copy_(value.expand_as(parameter))


HANDED: dict[str, Callable[[Tensor, Tensor], Tensor | None]] = {
    "expanded": lambda parameter, value: value.expand_as(parameter),
    "static": static,
    "of another library": lambda parameter, value: torch.from_numpy(
        static(parameter.detach(), value).numpy()
    ),
    "sparse": lambda parameter, value: value.expand_as(parameter).to_sparse(),
    "none": lambda parameter, value: (
        None if parameter.dim() == 1 else value.expand_as(parameter)
    ),
}


def run(
    options: dict[str, Any] | None, scenario: Scenario, dtype: torch.dtype
) -> list[Tensor]:
    """The update of one window; without options, that of bare torch, whose
    micro-batches are added by hand.
    """
    model = make_model().to(dtype)
    before = [each.detach().clone() for each in model.parameters()]
    opt: Any = MAKERS["sgd"](model.parameters())
    if options is not None:
        opt = gradaccum.wrap(opt, steps=4, **options)
    total = list(map(torch.zeros_like, before))
    for index in range(4):
        scenario(model, index)
        if options is None:
            for each, p in zip(total, model.parameters(), strict=True):
                each += 0 if p.grad is None else 0.5 * p.grad.to_dense() / 4
        else:
            opt.step()
        opt.zero_grad()
    if options is None:
        return total
    return [b - p.detach() for b, p in zip(before, model.parameters(), strict=True)]


def handed(make: Callable[[Tensor, Tensor], Tensor | None]) -> Scenario:
    def scenario(model: nn.Module, index: int) -> None:
        factor = torch.tensor(4.0 * index + 1, dtype=model[0].weight.dtype)  # type: ignore[index]
        Handed.apply(make, factor, *model.parameters()).backward()  # type: ignore[no-untyped-call]

    return scenario


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


ONE = torch.ones(20, dtype=torch.float64)
SCENARIOS = {
    **{name: handed(make) for name, make in HANDED.items()},
    "replaced": hooked(lambda gradient: 3 * gradient, after=False),
    "one for all": hooked(
        lambda gradient: ONE[: gradient.numel()].to(gradient.dtype).view_as(gradient),
        after=False,
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
    dtype = torch.float32 if mode == "moving" else torch.float64
    if scenario in REFUSED and mode != "apart":
        with refused(UsageError, "separate_sums=True"):
            run(MODES[mode], SCENARIOS[scenario], dtype)
        return
    mine, theirs = (
        run(options, SCENARIOS[scenario], dtype) for options in (MODES[mode], None)
    )
    off = 100 * torch.finfo(dtype).eps
    torch.testing.assert_close(mine, theirs, rtol=off, atol=off)
