"""Windows of several workers under interleavings that a seed chooses, with and without
a worker that is lost.

A failure names its seed: `require_alike` or `require_said` of that seed replays it.

All workers make the updates of the large batches, and alike: parameters, learning
rates, listeners. If a worker is lost, each other one has made the updates before,
whole, and says so, or makes one more.
"""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradaccum
from conformance_tests.framework_tests.torch_turns import Group, Lost, run

FEW, MANY = 40, 2000


class MicroBatch(NamedTuple):
    """Some items, and what else happens."""

    x: Tensor
    second: bool
    """The model takes its second branch."""
    counts: bool
    """It has a weight; False: weight 0, and a loss that is NaN."""
    resumes: bool
    """The optimizer is saved and loaded before it."""


class Job(NamedTuple):
    """A training run of several workers."""

    steps: int
    engine: str
    """Who tells the optimizer which workers share the window."""
    reduction: str
    clip_norm: float | None
    shares: list[list[MicroBatch]]
    """By worker."""


class Report(NamedTuple):
    """What a worker has at the end, or when another one was lost."""

    parameters: list[Tensor]
    updates: int
    windows: int
    """As its listener counts them."""
    rate: float
    lost: bool
    """The loss of another worker was said."""


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.frozen = (
            nn.Linear(3, 2),
            nn.Linear(3, 2),
            nn.Linear(3, 2).requires_grad_(False),
        )
        self.double()

    def forward(self, x: Tensor, second: bool) -> Tensor:
        return (
            (self.first(x) + (self.second(x) if second else 0) + self.frozen(x))
            .square()
            .mean()
        )


def job_of(seed: int) -> Job:
    chosen = random.Random(seed)
    items = torch.Generator().manual_seed(seed)
    shares = []
    for _ in range(chosen.choice((2, 2, 3, 4))):
        sizes = [chosen.randint(1, 4) for _ in range(chosen.randint(0, 6))]
        micro_batches = [
            MicroBatch(
                torch.randn(size, 3, dtype=torch.float64, generator=items),
                *(chosen.random() < often for often in (0.3, 0.9, 0.2)),
            )
            for size in sizes
        ]
        if micro_batches and chosen.random() < 0.15:
            chosen.choice(micro_batches).x[0, 0] = math.inf
        shares.append(micro_batches)
    engine = chosen.choice(("process_group", "module"))
    return Job(
        chosen.randint(1, 3),
        engine,
        chosen.choice(("mean", "sum_per_item")),
        chosen.choice((None, 0.1)),
        shares,
    )


def learn(model: nn.Module, opt: Any, job: Job, micro_batch: MicroBatch) -> None:
    x, second, counts, _ = micro_batch
    loss = model(x, second) * (1 if counts else math.nan)
    opt.backward(
        loss * len(x) if job.reduction == "sum_per_item" else loss,
        weight=len(x) * counts,
    )
    opt.step()
    opt.zero_grad()


def train(
    model: nn.Module, opt: Any, job: Job, micro_batches: Sequence[MicroBatch]
) -> Report:
    windows: list[Any] = []
    opt.add_listener(windows.append)
    scheduler = gradaccum.wrap(torch.optim.lr_scheduler.ExponentialLR(opt, 0.9))
    said = False
    try:
        for micro_batch in micro_batches:
            if micro_batch.resumes:
                opt.load_state_dict(copy.deepcopy(opt.state_dict()))
            learn(model, opt, job, micro_batch)
            scheduler.step()
        opt.flush()
        scheduler.step()
    except gradaccum.UsageError as error:
        said = "expected every worker to end its window too" in str(error)
        if not said:
            raise
        opt.discard()
        opt.state_dict()
    return Report(
        [each.detach().clone() for each in model.parameters()],
        opt.result.optimizer_step,
        len(windows),
        opt.param_groups[0]["lr"],
        said,
    )


def as_worker(job: Job, rank: int, group: dist.ProcessGroup) -> Report:
    model: nn.Module = Model()
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if job.engine == "module":
        model = DistributedDataParallel(model, find_unused_parameters=True)
    workers = {job.engine: {"module": model, "process_group": group}[job.engine]}
    opt = gradaccum.wrap(
        inner, job.steps, reduction=job.reduction, clip_norm=job.clip_norm, **workers
    )
    Group.turns.count(rank)
    return train(model, opt, job, job.shares[rank])


def large_batches(job: Job) -> list[Report]:
    """Return what one worker has after each number of windows of all micro-batches,
    from none to all.
    """
    model = Model()
    opt = gradaccum.wrap(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        None,
        reduction=job.reduction,
        clip_norm=job.clip_norm,
    )
    windows: list[Any] = []
    opt.add_listener(windows.append)
    scheduler = gradaccum.wrap(torch.optim.lr_scheduler.ExponentialLR(opt, 0.9))

    def report() -> Report:
        state = [each.detach().clone() for each in model.parameters()]
        return Report(
            state,
            opt.result.optimizer_step,
            len(windows),
            opt.param_groups[0]["lr"],
            False,
        )

    found = [report()]
    for start in range(0, max(map(len, job.shares)), job.steps):
        for share in job.shares:
            for micro_batch in share[start : start + job.steps]:
                learn(model, opt, job, micro_batch)
        opt.flush()
        scheduler.step()
        found.append(report())
    return found


def require_equal(mine: Report, large: Report) -> None:
    assert (mine.updates, mine.windows, mine.rate) == (
        large.updates,
        large.windows,
        large.rate,
    )
    for a, b in zip(mine.parameters, large.parameters, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def seeds() -> list[Any]:
    return [
        pytest.param(
            range(start, start + FEW),
            id=f"{start}-",
            marks=[pytest.mark.deep] * (start > 0),
        )
        for start in range(0, MANY, FEW)
    ]


def as_workers(job: Job, seed: int, lost: tuple[int, int] | None = None) -> list[Any]:
    return run(
        len(job.shares), seed, lambda rank, group: as_worker(job, rank, group), lost
    )


def require_alike(seed: int) -> None:
    job = job_of(seed)
    for mine in as_workers(job, seed):
        assert isinstance(mine, Report), repr(mine)
        require_equal(mine, large_batches(job)[-1])


def require_said(seed: int) -> None:
    job, chosen = job_of(seed), random.Random(~seed)
    lost = chosen.randrange(len(job.shares)), chosen.randint(1, 16)
    everyone = as_workers(job, seed, lost)
    after = {each.windows: each for each in large_batches(job)}
    survivors = [each for each in everyone if not isinstance(each, Lost)]
    assert len(survivors) in (len(everyone), len(everyone) - 1)
    for mine in survivors:
        assert isinstance(mine, Report), repr(mine)
        require_equal(mine, after[mine.windows])
        assert (
            mine.lost or mine.windows == max(after) or len(survivors) == len(everyone)
        )
    windows = [each.windows for each in survivors]
    assert max(windows) - min(windows) <= 1


class Log(NamedTuple):
    """The windows of a worker whose group has lost another one."""

    parameters: list[Tensor]
    updates: int
    windows: list[list[int]]
    """By window: this worker's micro-batches in it."""
    closed: int
    """The windows that this worker had closed when it left the group."""


def as_survivor(job: Job, rank: int, group: dist.ProcessGroup) -> Log:
    """Train as a worker that goes on in a group of those that are left."""
    model, micro_batches = Model(), job.shares[rank]
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    opt = gradaccum.wrap(
        inner,
        job.steps,
        reduction=job.reduction,
        clip_norm=job.clip_norm,
        process_group=group,
    )
    windows: list[list[int]] = [[]]
    opt.add_listener(lambda window: windows.append([]))
    next_one = 0

    def train() -> None:
        nonlocal next_one
        while next_one < len(micro_batches):
            windows[-1].append(next_one)
            next_one += 1
            learn(model, opt, job, micro_batches[next_one - 1])
        opt.flush()

    Group.turns.count(rank)
    try:
        train()
        left = Group.is_left(rank)
    except gradaccum.UsageError as error:
        assert "opt.regroup" in str(error)  # noqa: PT017
        left = True
    closed = len(windows) - 1
    if left:
        opt.regroup(Group.of_those_left(rank))
        saved = opt.state_dict()["gradaccum"]
        if saved["optimizer_step"] + saved["skipped_windows"] > closed:
            windows.append([])  # Others had closed the window, with this worker's part.
        opt.flush()
        train()
    state = [each.detach().clone() for each in model.parameters()]
    return Log(state, opt.result.optimizer_step, windows[:-1], closed)


def require_regrouped(seed: int) -> None:
    """The windows before hold all workers' micro-batches, the one in which a worker is
    lost and those behind it the others'.
    """
    job, chosen = job_of(seed), random.Random(~seed)
    lost = chosen.randrange(len(job.shares)), chosen.randint(1, 16)
    everyone = run(
        len(job.shares), seed, lambda rank, group: as_survivor(job, rank, group), lost
    )
    survivors = {
        rank: each for rank, each in enumerate(everyone) if not isinstance(each, Lost)
    }
    assert all(
        isinstance(each, Log) for each in everyone if not isinstance(each, Lost)
    ), everyone
    assert len({len(each.windows) for each in survivors.values()}) == 1
    model, closed = Model(), max(each.closed for each in survivors.values())
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    opt = gradaccum.wrap(inner, None, reduction=job.reduction, clip_norm=job.clip_norm)
    for window in range(len(next(iter(survivors.values())).windows)):
        for rank, share in enumerate(job.shares):
            own = (
                range(window * job.steps, (window + 1) * job.steps)
                if window < closed
                else ()
            )
            for index in survivors[rank].windows[window] if rank in survivors else own:
                if index < len(share):
                    learn(model, opt, job, share[index])
        opt.flush()
    for mine in survivors.values():
        assert mine.updates == opt.result.optimizer_step
        for a, b in zip(mine.parameters, model.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("check", [require_alike, require_said, require_regrouped])
@pytest.mark.parametrize("some", seeds())
def test_interleavings(some: range, check: Callable[[int], None]) -> None:
    for seed in some:
        try:
            check(seed)
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
