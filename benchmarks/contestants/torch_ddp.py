"""The loops that people write around `DistributedDataParallel` to accumulate gradients,
each as one window, and ours.

Every recipe takes the parallel module, its optimizer, a function from the module to the
loss of one micro-batch, and the number of micro-batches in a window.
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
from benchmarks.contestants.torch_least import Watch
from gradaccum.kit import (
    State,
    accumulate,
    at_rest,
    close,
    decide,
    initial_state,
    joined,
    make_options,
    rate_bits,
    require_same_rates,
    select,
)

BASELINE = "no_sync by hand"

Loss = Callable[[nn.Module], Tensor]
Window = Callable[[], object]
Recipe = Callable[[DistributedDataParallel, torch.optim.Optimizer, Loss, int], Window]


def by_hand(clip_norm: float | None = None, every: bool = False) -> Recipe:
    """What torch's documentation of ``no_sync`` shows; `every`: without it, so that
    each backward pass reduces.
    """

    def recipe(
        parallel: DistributedDataParallel,
        optimizer: torch.optim.Optimizer,
        loss: Loss,
        steps: int,
    ) -> Window:
        def window() -> None:
            for index in range(steps):
                with (
                    nullcontext() if every or index == steps - 1 else parallel.no_sync()
                ):
                    (loss(parallel) / steps).backward()  # type: ignore[no-untyped-call]
            if clip_norm is not None:
                nn.utils.clip_grad_norm_(parallel.parameters(), clip_norm)
            optimizer.step()
            optimizer.zero_grad()

        return window

    return recipe


def promising(clip_norm: float | None = None) -> Recipe:
    """What gradaccum promises, and no more, by hand: the floor of its time.

    The loop notices what else changes a ``.grad``, steps the optimizer, moves its rates
    or sets the module's flag, copies a gradient that lies in others' memory, and counts
    and decides by the transitions of the core. Workers may hold different numbers of
    items, so weights, losses and flags are added up, before the sums; all must have the
    same rates, and gradients of the same parameters, dense and without a graph. A sum
    that is not finite applies no update, for which its norm is read; versions tell how
    far an update came that raised.
    """

    def recipe(
        parallel: DistributedDataParallel,
        optimizer: torch.optim.Optimizer,
        loss: Loss,
        steps: int,
    ) -> Window:
        parameters, options = (
            list(parallel.parameters()),
            make_options(steps, clip_norm=clip_norm),
        )
        sizes, watch, seen = (
            list(map(Tensor.numel, parameters)),
            Watch(parameters),
            _seen(optimizer),
        )
        workers, rank, noted = dist.get_world_size(), dist.get_rank(), _Noted()
        parallel.register_forward_pre_hook(_wait)
        optimizer.register_step_pre_hook(noted.require_stepping)

        def window(fields: State = initial_state()) -> None:  # noqa: B008 - a state is immutable
            losses, rates = 0.0, [group["lr"] for group in optimizer.param_groups]
            for _ in range(steps):
                value = loss(parallel)
                value.backward()  # type: ignore[no-untyped-call]
                watch.require_whole()
                losses += value.item()
                fields = at_rest(accumulate(fields, 1.0, True, select))
            gradients = [
                parameter.grad for parameter in parameters if parameter.grad is not None
            ]
            _require(
                _seen(optimizer) == seen
                and rates == [group["lr"] for group in optimizer.param_groups]
            )
            _require(
                not any(each.is_sparse or each.requires_grad for each in gradients)
            )
            present = [parameter.grad is not None for parameter in parameters]
            bits = rate_bits(*rates)
            counted = [fields.weight, fields.overflow, losses, *bits, *present]
            numbers = torch.tensor(counted, dtype=torch.float64)
            dist.all_reduce(numbers, group=parallel.process_group)
            weight, overflows, losses, *rest = numbers.tolist()
            require_same_rates(rates, rest[: len(bits)], workers, rank)
            _require(present == [count > 0 for count in rest[len(bits) :]])
            total = torch.cat([each.view(-1) for each in gradients])
            dist.all_reduce(total, group=parallel.process_group)
            norm = torch.linalg.vector_norm(total).item()
            ended = joined(fields, weight, overflows > 0)
            apply, overflow, divisor, _ = decide(
                ended, norm, math.isfinite(norm), options, select
            )
            if apply:
                for parameter, part in zip(
                    parameters, torch.split(total, sizes), strict=True
                ):
                    parameter.grad = part.view_as(parameter)
                noted.versions = [
                    each.grad._version for each in parameters if each.grad is not None
                ]
                total.mul_(1 / divisor)
                noted.stepping = True
                optimizer.step()
                noted.stepping = False
            close(ended, apply, overflow, options, select)
            watch.clear()

        return window

    return recipe


class _Noted:
    def __init__(self) -> None:
        self.stepping, self.versions = False, list[int]()

    def require_stepping(self, *_: object) -> None:
        _require(self.stepping)


def _seen(optimizer: torch.optim.Optimizer) -> list[object]:
    """What casting, freezing or replacing a parameter changes."""
    return [
        (id(each), each.dtype, each.requires_grad)
        for group in optimizer.param_groups
        for each in group["params"]
    ]


def _require(holds: bool) -> None:
    if not holds:
        raise RuntimeError("the loop is not as it was")


def _wait(module: nn.Module, *_: object) -> None:
    vars(module)["require_backward_grad_sync"] = False


def wrapped(**options: Any) -> Recipe:
    """`gradaccum.wrap` with ``module=`` and `options`, and a loop as without
    accumulation.
    """

    def recipe(
        parallel: DistributedDataParallel,
        inner: torch.optim.Optimizer,
        loss: Loss,
        steps: int,
    ) -> Window:
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
