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
Make = Callable[[nn.Module], Any]


class Loop(NamedTuple):
    """What an optimizer asks of the loop."""

    graph: bool = False
    """It differentiates ``.grad``: ``backward(create_graph=True)``. It raises on a
    window's gradient, which has no graph, and ``separate_sums`` refuses it.
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

    def train(
        self,
        make: Make,
        options: dict[str, Any] | None = None,
        each: Callable[[nn.Module], object] = lambda model: None,
    ) -> nn.Module:
        """The run of the bare optimizer on the large batches; with `options`, those of
        the wrapper, on their micro-batches. `each` is called after each update.
        """
        model = self.model()
        opt = make(model)
        size = WINDOW
        if options is not None:
            opt = gradaccum.wrap(opt, **{"steps": WINDOW // PART, **options})
            opt.on_update(lambda: each(model))
            size = PART
        # Some optimizers draw random directions, some draw the updates at which they
        # renew what they keep.
        torch.manual_seed(3)
        random.seed(3)
        np.random.seed(3)
        for _ in range(self.epochs):
            for start in range(0, ROWS, size):
                opt.zero_grad()
                self.loss(model, start, size).backward(create_graph=self.graph)
                opt.step()
                if options is None:
                    each(model)
            if options is not None:
                opt.flush()
        if options is not None:
            assert opt.result.optimizer_step == 3 * self.epochs
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
    wanted = loop.train(make)
    assert furthest(wanted, loop.model()) > 1e-6, "the bare optimizer trains nothing"
    for options in SUMS:
        if not loop.graph:
            assert furthest(loop.train(make, options), wanted) < bound, options
            continue
        # The window's gradient has no graph.
        said = "separate_sums: .*gradients without a graph" if options else "grad_fn"
        with pytest.raises((gradaccum.UsageError, RuntimeError), match=said):
            loop.train(make, options)
