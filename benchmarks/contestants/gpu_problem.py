"""The problem of the GPU checks: one small network, one large batch and its windows,
with an eye on who waits for the device.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

STEPS = 4


class Problem:
    """An MLP and one large batch on a device, the same ones each time.

    Args:
        device: ``"cpu"`` or ``"cuda"``.
        width: of its layers.
        items: of the large batch.
    """

    def __init__(self, device: str, width: int, items: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.device, self.width = device, width
        self.x = torch.randn(items, width, generator=generator).to(device)
        self.y = torch.randint(0, width, (items,), generator=generator).to(device)

    def model(self, dtype: torch.dtype = torch.float32) -> nn.Module:
        torch.manual_seed(1)
        layers = (
            nn.Linear(self.width, 4 * self.width),
            nn.GELU(),
            nn.Linear(4 * self.width, self.width),
        )
        return nn.Sequential(*layers).to(self.device, dtype)

    def loss(
        self, model: nn.Module, part: int | None, autocast: torch.dtype | None = None
    ) -> Tensor:
        """Of one of `STEPS` parts of the batch, or of all of it."""
        x, y = (
            tensor if part is None else tensor.chunk(STEPS)[part]
            for tensor in (self.x, self.y)
        )
        with torch.autocast(
            self.device, dtype=autocast or torch.bfloat16, enabled=autocast is not None
        ):
            return nn.functional.cross_entropy(
                model(x.to(next(model.parameters()).dtype)).float(), y
            )

    def synchronize(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()


def inner(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-3, fused=True)


@contextmanager
def no_waiting(device: str) -> Iterator[None]:
    """Make whatever waits for the GPU an error; on a CPU there is nothing to wait
    for.
    """
    if device != "cuda":
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def window(
    problem: Problem,
    model: nn.Module,
    opt: Any,
    scaler: Any = None,
    autocast: torch.dtype | None = None,
) -> None:
    """One window in torch's own words if there is a scaler; nothing may wait before its
    last step.
    """
    for part in range(STEPS):
        loss = problem.loss(model, part, autocast)
        if part < STEPS - 1:
            with no_waiting(problem.device):
                micro_batch(loss, opt, scaler)
        else:
            micro_batch(loss, opt, scaler)


def micro_batch(loss: Tensor, opt: Any, scaler: Any) -> None:
    if scaler is None:
        opt.backward(loss)
        opt.step()
    else:
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
    opt.zero_grad()


def distance(a: nn.Module, b: nn.Module, start: nn.Module) -> float:
    """How far apart two models are, relative to how far they moved."""
    flat = [
        torch.cat([p.detach().double().flatten() for p in model.parameters()])
        for model in (a, b, start)
    ]
    return float((flat[0] - flat[1]).norm() / (flat[1] - flat[2]).norm())


def median_times(
    problem: Problem, actions: list[Callable[[], None]], rounds: int = 11
) -> list[float]:
    """Seconds that each action takes, taken in turns."""
    times: list[list[float]] = [[] for _ in actions]
    for _ in range(rounds):
        for action, taken in zip(actions, times, strict=True):
            problem.synchronize()
            begun = time.perf_counter()
            action()
            problem.synchronize()
            taken.append(time.perf_counter() - begun)
    return [sorted(taken)[rounds // 2] for taken in times]
