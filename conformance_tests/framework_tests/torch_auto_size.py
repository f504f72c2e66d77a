"""Run by two processes: automatic sizes of micro-batches that both must share.
``python -m ... RANK FOLDER``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradaccum
from conformance_tests.framework_tests.refusing import refused
from conformance_tests.framework_tests.torch_workers.common import (
    require_same_everywhere,
)
from conformance_tests.framework_tests.torch_workers.jobs import run_checks
from gradaccum import AutoMicroBatchSize, UsageError
from gradaccum_torch.large_batch import auto, backward

X = torch.linspace(-1, 2, 64, dtype=torch.float64).reshape(8, 8).sin()


def make() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def failing(
    model: nn.Module,
    above: int,
    make_error: Callable[[], Exception] = torch.OutOfMemoryError,
) -> Callable[[Tensor], Tensor]:
    """A loss that raises for more than `above` items."""

    def loss_fn(x: Tensor) -> Tensor:
        if len(x) > above:
            raise make_error()
        return model(x).square().mean()

    return loss_fn


def numbers(model: nn.Module) -> list[Any]:
    return [
        None if p.grad is None else p.grad.flatten().tolist()
        for p in model.parameters()
    ]


def both_halve(rank: int) -> None:
    """Only the second runs out of memory, and this one has done its attempt."""
    model, other, sizes = make(), make(), AutoMicroBatchSize()
    x = X * (rank + 1)
    got = backward(failing(model, 8 if rank == 0 else 3), x, micro_batch_size=sizes)
    assert sizes.size == 2
    other_loss = backward(failing(other, 8), x, micro_batch_size=2, optimizer=None)
    assert torch.equal(got, other_loss)
    assert numbers(model) == numbers(other)


def unequal_batches(rank: int) -> None:
    """Half of three is two, and so is the size of eight elsewhere."""
    model, sizes = make(), AutoMicroBatchSize()
    backward(
        failing(model, 8 if rank == 0 else 2), X[: 8 - 5 * rank], micro_batch_size=sizes
    )
    require_same_everywhere(sizes.size)
    assert sizes.size == 2


def other_error(rank: int) -> None:
    """Whoever raised has its own error, and the other does not wait for it."""
    model, sizes = make(), AutoMicroBatchSize()
    expected = UsageError if rank == 0 else KeyError
    with refused(expected, "worker that raised" if rank == 0 else "lost"):
        backward(
            failing(model, 8 if rank == 0 else 3, lambda: KeyError("lost")),
            X,
            micro_batch_size=sizes,
        )
    assert numbers(model) == [None] * 4
    assert sizes.size is None


def nothing_fits(rank: int) -> None:
    model, sizes = make(), AutoMicroBatchSize()
    with refused(UsageError, "one item"):
        backward(failing(model, 8 if rank == 0 else 0), X, micro_batch_size=sizes)
    assert numbers(model) == [None] * 4


def one_update(rank: int) -> None:
    """The window of both, with one update that is the same on both and the same as
    without failures.
    """

    def trained(size: Any, above: int) -> list[Any]:
        model = make()
        parallel = DistributedDataParallel(model)
        opt = gradaccum.wrap(
            torch.optim.SGD(model.parameters(), lr=0.5), steps=None, module=parallel
        )
        backward(
            failing(parallel, above),
            X[4 * rank : 4 * rank + 4],
            micro_batch_size=size,
            optimizer=opt,
        )
        assert opt.result.applied
        assert opt.result.optimizer_step == 1
        return [p.flatten().tolist() for p in model.parameters()]

    sizes = AutoMicroBatchSize()
    got = trained(sizes, 4 if rank == 0 else 1)
    assert sizes.size == 1
    assert got == trained(1, 4)
    require_same_everywhere(got)


CHECKS = {
    check.__name__: check
    for check in (both_halve, unequal_batches, other_error, nothing_fits, one_update)
}

if __name__ == "__main__":
    # The loss says when memory runs out.
    auto.require_device = lambda sizes, tensors: None
    run_checks(CHECKS, int(sys.argv[1]), Path(sys.argv[2]))
