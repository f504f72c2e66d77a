"""A wrapped optimizer that drives a `torch.amp.GradScaler`, and such a scaler around a bare optimizer."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import gradaccum


class Alone:
    """A scaler around a bare optimizer, stepped and updated once per event."""

    def __init__(self, rule: dict[str, Any]) -> None:
        self.scaler = torch.amp.GradScaler("cpu", **rule)
        self.scaler.scale(torch.zeros(()))
        self.parameter = torch.zeros(1, requires_grad=True)
        self.optimizer = torch.optim.SGD([self.parameter], lr=0.0)

    def event(self, overflow: bool) -> tuple[float, int]:
        self.parameter.grad = torch.full((1,), math.inf if overflow else 0.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return state_of(self.scaler)


def state_of(scaler: torch.amp.GradScaler) -> tuple[float, int]:
    state = scaler.state_dict()
    return state["scale"], state["_growth_tracker"]


class Loop:
    """A wrapped optimizer with a scaler and one parameter. `micro_batch` takes the gradient that the parameter gets."""

    def __init__(self, kind: str, *, steps: Any = 3, fused: bool = False, **rule: Any) -> None:
        self.kind = kind
        self.scaler = torch.amp.GradScaler("cpu", **rule)
        self.parameter = torch.zeros(2, requires_grad=True)
        inner = torch.optim.AdamW([self.parameter], lr=0.5, fused=True) if fused else torch.optim.SGD([self.parameter], lr=1.0)
        self.opt: Any = gradaccum.wrap(inner, steps=steps, loss_scale=self.scaler)

    def micro_batch(self, gradient: float, weight: float | None = None) -> None:
        loss = (self.parameter * torch.full((2,), gradient)).sum()
        if self.kind == "scaler.step":
            self.scaler.scale(loss).backward()
            self.scaler.step(self.opt)
            self.scaler.update()
        elif self.kind == "opt.scale":
            self.opt.scale(loss).backward()
            self.opt.step()
        else:
            self.opt.backward(loss, weight)
            self.opt.step()
        self.opt.zero_grad()


KINDS = ("scaler.step", "opt.scale", "opt.backward")
by_kind = pytest.mark.parametrize("kind", KINDS)
