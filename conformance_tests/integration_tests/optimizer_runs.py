"""A small model trained by any optimizer: bare on the large batches, and wrapped on
their micro-batches.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import gradaccum

ROWS, WINDOW, PART = 20, 8, 2
X = torch.randn(
    ROWS, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
)
Y = X.sum(dim=1, keepdim=True).sin()
"""Two windows of four micro-batches and one of two, per epoch."""

SUMS = [{}, {"separate_sums": True}]
Make = Callable[[nn.Module], torch.optim.Optimizer]


class Loop(NamedTuple):
    """What an optimizer asks of the loop."""

    graph: bool = False
    """It differentiates ``.grad``: ``backward(create_graph=True)``. A copy would lose
    the graph, so ``separate_sums`` refuses it.
    """
    bias: bool = True
    """False: it takes matrices only."""
    dtype: torch.dtype = torch.float64
    epochs: int = 2

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Linear(5, 4, bias=self.bias), nn.Tanh(), nn.Linear(4, 1, bias=self.bias)
        ).to(self.dtype)

    def loss(self, model: nn.Module, start: int, size: int) -> Tensor:
        rows = slice(start, min(start + size, ROWS))
        return (model(X[rows].to(self.dtype)) - Y[rows].to(self.dtype)).square().mean()


def draw_again() -> None:
    """Some optimizers draw random directions, some draw the updates at which they renew
    what they keep.
    """
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)


def large(make: Make, loop: Loop = Loop()) -> nn.Module:  # noqa: B008
    """The bare optimizer's run."""
    model = loop.model()
    opt = make(model)
    draw_again()
    for _ in range(loop.epochs):
        for start in range(0, ROWS, WINDOW):
            opt.zero_grad()
            loop.loss(model, start, WINDOW).backward(create_graph=loop.graph)
            opt.step()
    return model


def accumulated(make: Make, loop: Loop = Loop(), **options: Any) -> nn.Module:  # noqa: B008
    """The wrapped optimizer's run; the last window of an epoch is flushed."""
    model = loop.model()
    opt = gradaccum.wrap(make(model), steps=WINDOW // PART, **options)
    draw_again()
    for _ in range(loop.epochs):
        for start in range(0, ROWS, PART):
            opt.zero_grad()
            loop.loss(model, start, PART).backward(create_graph=loop.graph)
            opt.step()
        opt.flush()
    assert opt.result.optimizer_step == 3 * loop.epochs
    return model


def furthest(mine: nn.Module, wanted: nn.Module) -> float:
    """The largest difference of two models' parameters, relative to the largest element
    of each parameter.
    """
    pairs = [
        (p.detach(), q.detach())
        for p, q in zip(mine.parameters(), wanted.parameters(), strict=True)
    ]
    return max(float((p - q).abs().max() / q.abs().max()) for p, q in pairs)


def assert_equals_large_batches(
    make: Make,
    loop: Loop = Loop(),  # noqa: B008
    bound: float = 1e-11,
) -> None:
    """The same parameters, with the sum in ``.grad`` and apart from it; and they
    moved.
    """
    wanted = large(make, loop)
    assert furthest(wanted, loop.model()) > 1e-6, "the bare optimizer trains nothing"
    for options in SUMS[:1] if loop.graph else SUMS:
        assert furthest(accumulated(make, loop, **options), wanted) < bound, options
    if loop.graph:
        with pytest.raises(
            gradaccum.UsageError, match=r"separate_sums: .*leave separate_sums=True out"
        ):
            accumulated(make, loop, separate_sums=True)
