"""A window that was saved open and goes on with other workers, as a sum; what is refused of it."""

from __future__ import annotations

from typing import Any

import mindspore as ms

import gradaccum
from conformance_tests.framework_tests.mindspore_workers.checks import check
from conformance_tests.framework_tests.mindspore_workers.common import (
    WORLD,
    Truth,
    Worker,
    micro_batches,
    numbers,
    require_same_everywhere,
    require_truth,
)
from conformance_tests.framework_tests.refusing import refused
from gradaccum_mindspore import load_checkpoint_into, redistributed


def files(rank: int, worker: Worker) -> list[Any]:
    """What each worker saved, by rank."""
    ms.save_checkpoint(worker.cell, f"open-{rank}.ckpt")
    require_same_everywhere("saved")
    found = [ms.load_checkpoint(f"open-{one}.ckpt") for one in range(WORLD)]
    require_same_everywhere("loaded")
    return found


def opened(rank: int) -> Worker:
    """A worker whose window holds two micro-batches of it, or one."""
    worker = Worker(steps=None)
    for batch in micro_batches(rank)[: 2 - rank]:
        worker.learn(batch)
    return worker


@check
def window_of_two_goes_on_with_one(rank: int) -> None:
    (state,) = redistributed(files(rank, opened(rank)), 1)
    alone, truth = Worker(steps=None, data_parallel=False), Truth()
    load_checkpoint_into(alone.cell, state)
    alone.train([micro_batches(0)[2]])
    truth.window([*micro_batches(0)[:3], micro_batches(1)[0]])
    require_truth(alone, truth)


@check
def window_of_four_goes_on_with_two(rank: int) -> None:
    """The four are those that the window of two was spread over."""
    four = redistributed(files(rank, opened(rank)), 4)
    worker, truth = Worker(steps=None), Truth()
    load_checkpoint_into(worker.cell, redistributed(four, WORLD)[rank])
    worker.train([micro_batches(rank)[2]])
    truth.window([*micro_batches(0)[:3], micro_batches(1)[0], micro_batches(1)[2]])
    require_truth(worker, truth)
    require_same_everywhere((numbers(worker), worker.opt.result))


@check
def open_window_of_others_is_refused(rank: int) -> None:
    """Another number of workers, or another worker's file."""
    own = files(rank, opened(rank))
    with refused(gradaccum.CheckpointError, "redistributed"):
        load_checkpoint_into(Worker(steps=None, data_parallel=False).cell, own[rank])
    with refused(gradaccum.CheckpointError, f"rank {1 - rank}"):
        load_checkpoint_into(Worker(steps=None).cell, own[1 - rank])


@check
def any_worker_s_file_will_do_between_windows(rank: int) -> None:
    closed = opened(rank)
    closed.opt.flush()
    for options in ({}, {"data_parallel": False}):
        other = Worker(steps=None, **options)
        load_checkpoint_into(other.cell, files(rank, closed)[1 - rank])
        assert numbers(other) == numbers(closed)
