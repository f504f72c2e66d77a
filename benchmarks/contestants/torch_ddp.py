"""The loops that people write around `DistributedDataParallel` to accumulate gradients, each as one window, and ours.

Every recipe takes the parallel module, its optimizer, a function from the module to the loss of one micro-batch, and the number of
micro-batches in a window.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradaccum

BASELINE = "no_sync by hand"

Loss = Callable[[nn.Module], Tensor]
Window = Callable[[], object]
Recipe = Callable[[DistributedDataParallel, torch.optim.Optimizer, Loss, int], Window]


def by_hand(clip_norm: float | None = None, every: bool = False) -> Recipe:
    """What torch's documentation of ``no_sync`` shows; `every`: without it, so that each backward pass reduces."""

    def recipe(parallel: DistributedDataParallel, optimizer: torch.optim.Optimizer, loss: Loss, steps: int) -> Window:
        def window() -> None:
            for index in range(steps):
                with nullcontext() if every or index == steps - 1 else parallel.no_sync():
                    (loss(parallel) / steps).backward()  # type: ignore[no-untyped-call]
            if clip_norm is not None:
                nn.utils.clip_grad_norm_(parallel.parameters(), clip_norm)
            optimizer.step()
            optimizer.zero_grad()

        return window

    return recipe


def promising(clip_norm: float | None = None) -> Recipe:
    """What gradaccum promises, and no more, by hand: the floor of its time.

    Workers may hold different numbers of items, so weights and losses are added up in the one reduction, after the last backward pass. A
    sum that is not finite makes no update, for which its norm is read.
    """

    def recipe(parallel: DistributedDataParallel, optimizer: torch.optim.Optimizer, loss: Loss, steps: int) -> Window:
        parameters = list(parallel.parameters())
        sizes = list(map(Tensor.numel, parameters))

        def window() -> None:
            losses = 0.0
            with parallel.no_sync():
                for _ in range(steps):
                    value = loss(parallel)
                    value.backward()  # type: ignore[no-untyped-call]
                    losses += value.item()
            gradients = [parameter.grad.view(-1) for parameter in parameters if parameter.grad is not None]
            packed = torch.cat([*gradients, torch.tensor([float(steps), losses])])
            dist.all_reduce(packed, group=parallel.process_group)
            total, (weight, losses) = packed[:-2], packed[-2:].tolist()
            norm = torch.linalg.vector_norm(total).item() / weight
            if math.isfinite(norm) and math.isfinite(losses / weight):
                excess = 1.0 if clip_norm is None else max(1.0, norm / clip_norm)
                total.mul_(1 / (weight * excess))
                for parameter, part in zip(parameters, torch.split(total, sizes), strict=True):
                    parameter.grad = part.view_as(parameter)
                optimizer.step()
            optimizer.zero_grad()

        return window

    return recipe


def wrapped(**options: Any) -> Recipe:
    """`gradaccum.wrap` with ``module=`` and `options`, and a loop as without accumulation."""

    def recipe(parallel: DistributedDataParallel, inner: torch.optim.Optimizer, loss: Loss, steps: int) -> Window:
        optimizer = gradaccum.wrap(inner, steps=steps, module=parallel, **options)

        def window() -> None:
            for _ in range(steps):
                loss(parallel).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                optimizer.zero_grad()

        return window

    return recipe


def recipes(clip_norm: float | None) -> dict[str, Recipe]:
    """The recipes, the baseline first."""
    return {
        BASELINE: by_hand(clip_norm),
        "gradaccum": wrapped(clip_norm=clip_norm),
        "by hand with the same promises": promising(clip_norm),
        "reduced in each backward pass": by_hand(clip_norm, every=True),
    }
