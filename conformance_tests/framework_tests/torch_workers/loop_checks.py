"""The loop check over two workers: a row of coefficients for each."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
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


def applied_once(parallel: Any, optimizer: Any, data: Any) -> None:
    for x, y in data:
        (loss_fn(parallel(x), y) * len(x) * 2 / 21).backward()
    if dist.get_rank() == 0:
        optimizer.step()


def wrapped(parallel: Any, optimizer: Any, data: Any) -> None:
    run(parallel, gradaccum.wrap(optimizer, steps=3, module=parallel), data)


def run(net: Any, opt: Any, data: Any) -> None:
    for x, y in opt.epoch(data):
        opt.backward(loss_fn(net(x), y), weight=len(x))
        opt.step()
        opt.zero_grad()


@check
def loop_check_sees_both_workers(rank: int) -> None:
    report = report_of(rank, wrapped)
    assert not report.problems, report
    assert len(report.updates[0].coefficients) == 6, "those of both workers"
    found = {problem.kind for problem in report_of(rank, never_reduced).problems}
    assert "not_reduced" in found, found
    report = report_of(rank, applied_once)
    assert not report.updates, "the first worker's update is right"
    assert "worker 1" in report.notes[0]
    with refused(gradaccum.UsageError, "micro_batches", "[3, 2]"):
        report_of(rank, never_reduced, 3 - rank)
    with refused(gradaccum.UsageError, "same gradients"):
        report_of(0, wrapped)


@check
def process_that_trains_alone_is_checked_alone(rank: int) -> None:
    """Unless a module averages the gradients of each micro-batch."""
    model = nn.Linear(6, 2)
    opt = gradaccum.wrap(
        torch.optim.SGD(model.parameters()),
        steps=3,
        separate_sums=True,
        process_group="alone",
    )
    data = [(x, x[:, :2]) for x in torch.randn(2, 3, 4, 6)[rank]]
    for kind in (nn.Sequential, DistributedDataParallel):
        train = partial(run, kind(model), opt, data)
        gradaccum.assert_accumulates(
            train, opt, lambda x, y: loss_fn(model(x), y), data
        )


@check
def what_differs_between_workers_is_refused(rank: int) -> None:
    """Stages of a pipeline, and numbers of labels."""
    for stage, words in ((rank, "same parameters"), (0, "weight")):
        model: Any = nn.Linear(1, 1 + stage)
        model.forward = lambda labels, net=model: {"loss": (net.weight * labels).sum()}
        optimizer = torch.optim.SGD(model.parameters())
        with gradaccum.recording(optimizer, model) as record:
            model(labels=torch.ones(1, 5 - rank))
        with refused(gradaccum.UsageError, words):
            record.report()
