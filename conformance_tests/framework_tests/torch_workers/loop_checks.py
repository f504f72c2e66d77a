"""The loop check over two workers: a row of coefficients for each."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradaccum
from conformance_tests.framework_tests.refusing import refused

from .jobs import check

SIZES = ((5, 3, 4), (2, 6, 1))
"""Items of the micro-batches of worker 0 and worker 1."""
TOTAL = 21
loss_fn = nn.functional.mse_loss


def batches(rank: int) -> list[tuple[Any, Any]]:
    generator = torch.Generator().manual_seed(rank)
    return [
        (
            torch.randn(size, 6, dtype=torch.float64, generator=generator),
            torch.randn(size, 2, dtype=torch.float64, generator=generator),
        )
        for size in SIZES[rank]
    ]


def report_of(
    rank: int, train: Callable[[Any, Any, Any], None], data: Any
) -> gradaccum.LoopReport:
    """Check a loop over a DDP module, its inner module's optimizer and the data."""
    torch.manual_seed(1)
    layers = nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)
    model = nn.Sequential(*layers).double()
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return gradaccum.check_loop(
        lambda: train(parallel, optimizer, data),
        optimizer,
        lambda x, y: loss_fn(model(x), y),
        data,
    )


def is_last(number: int) -> bool:
    return number == len(SIZES[0]) - 1


def weighed(parallel: Any, optimizer: Any, data: Any) -> None:
    """DDP takes the mean over two workers, which the loss makes up for."""
    for number, (x, y) in enumerate(data):
        with nullcontext() if is_last(number) else parallel.no_sync():
            (loss_fn(parallel(x), y) * len(x) / TOTAL * 2).backward()
    optimizer.step()


def mean_of_means(parallel: Any, optimizer: Any, data: Any) -> None:
    for x, y in data:
        (loss_fn(parallel(x), y) / len(data)).backward()
    optimizer.step()


def never_reduced(parallel: Any, optimizer: Any, data: Any) -> None:
    for x, y in data:
        with parallel.no_sync():
            (loss_fn(parallel(x), y) * len(x) / 12).backward()
    optimizer.step()


def wrapped(parallel: Any, optimizer: Any, data: Any) -> None:
    opt = gradaccum.wrap(optimizer, steps=3, module=parallel)
    for x, y in opt.epoch(data):
        opt.backward(loss_fn(parallel(x), y), weight=len(x))
        opt.step()
        opt.zero_grad()


@check
def loop_check_sees_both_workers(rank: int) -> None:
    data = batches(rank)
    for train, kinds in (
        (weighed, []),
        (wrapped, []),
        (mean_of_means, ["mean_of_means"]),
    ):
        report = report_of(rank, train, data)
        assert [problem.kind for problem in report.problems] == kinds, report
        assert len(report.updates[0].coefficients) == 6, "those of both workers"
    report = report_of(rank, never_reduced, data)
    found = {problem.kind for problem in report.problems}
    assert "not_reduced" in found, report
    with refused(gradaccum.UsageError, "micro_batches", "[3, 2]"):
        report_of(rank, never_reduced, data[: 3 - rank])
