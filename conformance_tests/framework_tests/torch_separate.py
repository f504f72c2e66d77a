"""Helpers for ``separate_sums=True`` and closures: a model, its micro-batches, the
large batch, and the commonest loops.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

import gradaccum
from gradaccum_torch.optimizer import AccumulatingOptimizer

X, Y = (
    torch.randn(8, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1)),
    torch.arange(8.0, dtype=torch.float64)[:, None],
)
PARTS = [(X[i : i + 2], Y[i : i + 2]) for i in range(0, 8, 2)]


def make_model(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1)
    ).to(dtype)


def mse(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return (model(x) - y).square().mean()


def wrapped(model: nn.Module, steps: Any = 4, **options: Any) -> AccumulatingOptimizer:
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return gradaccum.wrap(inner, steps=steps, **{"separate_sums": True, **options})


def large(updates: int = 1) -> list[Tensor]:
    model = make_model()
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(updates):
        opt.zero_grad()
        mse(model, X, Y).backward()
        opt.step()
    return list(model.parameters())


def assert_same(model: nn.Module, expected: list[Tensor], bound: float = 1e-13) -> None:
    for mine, wanted in zip(model.parameters(), expected, strict=True):
        assert float((mine - wanted).detach().abs().max()) <= bound * float(
            wanted.detach().abs().max()
        )


def before_clear(
    model: nn.Module, opt: AccumulatingOptimizer, x: Tensor, y: Tensor
) -> None:
    model.zero_grad()
    mse(model, x, y).backward()
    opt.step()


def logged_norm(
    model: nn.Module, opt: AccumulatingOptimizer, x: Tensor, y: Tensor
) -> None:
    mse(model, x, y).backward()
    clip_grad_norm_(model.parameters(), float("inf"))
    opt.step()
    model.zero_grad()


def closed_over(
    model: nn.Module, opt: AccumulatingOptimizer, x: Tensor, y: Tensor
) -> None:
    def closure() -> Tensor:
        model.zero_grad()
        loss = mse(model, x, y)
        loss.backward()
        return loss

    assert isinstance(opt.step(closure), Tensor)
