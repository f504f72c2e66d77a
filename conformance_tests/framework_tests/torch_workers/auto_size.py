"""Automatic sizes of micro-batches, which both workers must share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import gradaccum
from gradaccum import AutoMicroBatchSize, UsageError
from gradaccum_torch import backward

from ..refusing import refused
from .common import build, ddp, require_same_everywhere, sgd
from .jobs import check

X = torch.linspace(-1, 2, 32, dtype=torch.float64).reshape(8, 4).sin()


def failing(
    model: nn.Module, above: int, error: type[Exception] = torch.OutOfMemoryError
) -> Callable[[Tensor], Tensor]:
    """A loss that raises for more than `above` items."""

    def loss_fn(x: Tensor) -> Tensor:
        if len(x) > above:
            raise error("lost")
        return model(x).square().mean()

    return loss_fn


@check
def worker_that_raises_leaves_none_waiting(rank: int) -> None:
    """It raises its own error, and the other names it."""
    model = build()
    loss_fn = failing(model, 8 if rank == 0 else 3, KeyError)
    kind = UsageError if rank == 0 else KeyError
    with refused(kind, "worker that raised" if rank == 0 else "lost"):
        backward(loss_fn, X, micro_batch_size=AutoMicroBatchSize())
    assert all(parameter.grad is None for parameter in model.parameters())


@check
def attempts_end_in_one_update(rank: int) -> None:
    """Of one size on both workers, and as without failures. Only the second runs out of
    memory: half of three is two, and so is the size of five elsewhere.
    """

    def trained(size: Any, above: int) -> list[Any]:
        model = build()
        parallel = ddp(model)
        opt = gradaccum.wrap(sgd(model), steps=None, module=parallel)
        x = X[3:] if rank == 0 else X[:3]
        loss_fn = failing(parallel, above)
        backward(loss_fn, x, micro_batch_size=size, optimizer=opt)
        assert opt.result.applied
        assert opt.result.optimizer_step == 1
        return [p.tolist() for p in model.parameters()]

    sizes = AutoMicroBatchSize()
    got = trained(sizes, 5 if rank == 0 else 2)
    assert sizes.size == 2
    assert got == trained(2, 5)
    require_same_everywhere(got)
