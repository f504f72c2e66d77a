"""The loop check over two workers: a row of coefficients for each."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradaccum

from ..refusing import refused
from .jobs import check

SIZES = ((5, 3, 4), (2, 6, 1))
"""Items of the micro-batches of worker 0 and worker 1."""
loss_fn = nn.functional.mse_loss


def report_of(rank: int, train: Any, micro_batches: int = 3) -> gradaccum.LoopReport:
    """Check a loop over a DDP module, its inner module's optimizer and the data."""
    torch.manual_seed(1)
    model = nn.Linear(6, 2)
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    items = torch.randn(24, 6).split([*SIZES[0], *SIZES[1], 3])
    data = [(x, x[:, :2] + 1) for x in items[3 * rank : 3 * rank + micro_batches]]
    return gradaccum.check_loop(
        lambda: train(parallel, optimizer, data),
        optimizer,
        lambda x, y: loss_fn(model(x), y),
        data,
    )


def never_reduced(parallel: Any, optimizer: Any, data: Any) -> None:
    with parallel.no_sync():
        for x, y in data:
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
    report = report_of(rank, wrapped)
    assert not report.problems, report
    assert len(report.updates[0].coefficients) == 6, "those of both workers"
    found = {problem.kind for problem in report_of(rank, never_reduced).problems}
    assert "not_reduced" in found, found
    with refused(gradaccum.UsageError, "micro_batches", "[3, 2]"):
        report_of(rank, never_reduced, 3 - rank)
