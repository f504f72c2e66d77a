"""The window of two workers is the large batch of both, whatever each of them holds."""

from __future__ import annotations

from conformance_tests.framework_tests.mindspore_workers.checks import check
from conformance_tests.framework_tests.mindspore_workers.common import (
    SIZE,
    WORLD,
    Truth,
    Worker,
    micro_batches,
    require_truth,
)
from conformance_tests.framework_tests.mindspore_workers.counting import called


@check
def discarded_window_is_one_worker_s_own(rank: int) -> None:
    worker = Worker(steps=None)
    for batch in micro_batches(rank)[:3]:
        worker.learn(batch)
    if rank == 1:
        worker.opt.discard()
    worker.opt.flush()
    truth = Truth()
    truth.window(micro_batches(0)[:3])
    require_truth(worker, truth)


@check
def two_reductions_per_window(rank: int) -> None:
    """One of six numbers and all learning rates, and one of the sums. A flush sends the former once more, to see whether all do."""
    with called() as calls:
        for steps in (1, 3):
            worker = Worker(steps=steps)
            calls.clear()
            for index in range(3):
                worker.learn(micro_batches(rank)[index])
                assert len(calls) == 2 * ((index + 1) // steps), "nothing within a window"
            assert [size for _, size in calls] == [6 + WORLD, SIZE] * (3 // steps)
            calls.clear()
            worker.opt.flush()
            assert [size for _, size in calls] == [6 + WORLD]
        assert {name for name, _ in calls} == {"AllReduce"}
