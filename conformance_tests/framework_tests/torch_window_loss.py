"""Helpers for a window's loss: a model, its loss, and micro-batches whose losses are passed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import gradaccum

X = torch.arange(12.0, dtype=torch.float64).reshape(6, 2) / 10


def made(**options: Any) -> tuple[torch.nn.Linear, Any]:
    model = torch.nn.Linear(2, 1, bias=False, dtype=torch.float64)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[1.0, -0.5]]))
    return model, gradaccum.wrap(torch.optim.SGD(model.parameters(), lr=0.1), **{"steps": 2, **options})


def loss_of(model: torch.nn.Module, rows: Tensor = X) -> Tensor:
    return model(rows).square().mean()


def feed(model: torch.nn.Module, opt: Any, *parts: Tensor) -> None:
    for rows in parts:
        opt.backward(loss_of(model, rows), weight=len(rows))
        opt.step()
        opt.zero_grad()


def near(model: torch.nn.Module, rows: Tensor = X) -> object:
    return pytest.approx(loss_of(model, rows).item(), rel=1e-13)
