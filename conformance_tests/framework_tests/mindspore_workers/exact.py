"""The window of two workers is the large batch of both, whatever each of them holds."""

from __future__ import annotations

import math

import mindspore as ms

import gradaccum
from conformance_tests.framework_tests.mindspore_workers.checks import check
from conformance_tests.framework_tests.mindspore_workers.common import (
    SIZE,
    Truth,
    Worker,
    all_windows,
    micro_batches,
    numbers,
    require_same_everywhere,
    require_truth,
)
from conformance_tests.framework_tests.mindspore_workers.counting import called


@check
def half_precision_is_summed_in_float32(rank: int) -> None:
    """Against one process that has all micro-batches and no other worker: the same bits."""
    plain, masters = {"loss_scale": gradaccum.DynamicLossScale(64.0)}, {"loss_scale": 64.0, "master_weights": True}
    for dtype, options in ((ms.float16, plain), (ms.float16, masters), (ms.bfloat16, masters)):
        worker = Worker(dtype=dtype, **options).train(micro_batches(rank))
        alone = Worker(dtype=dtype, steps=None, data_parallel=False, **options)
        for window in all_windows():
            alone.train(window)
        assert numbers(worker) == numbers(alone)
        assert math.isclose(worker.opt.result.grad_norm, alone.opt.result.grad_norm, rel_tol=1e-6)
        require_same_everywhere((numbers(worker), worker.opt.result))


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
    """One of a few numbers and one of the sums. A worker that flushes sends the few numbers once more, to see whether all do."""
    with called() as calls:
        for steps in (1, 3):
            worker = Worker(steps=steps)
            calls.clear()
            for index in range(3):
                worker.learn(micro_batches(rank)[index])
                assert len(calls) == 2 * ((index + 1) // steps), "nothing within a window"
            assert [size for _, size in calls if size >= SIZE] == [SIZE] * (3 // steps)
            assert max(size for _, size in calls) == SIZE
            calls.clear()
            worker.opt.flush()
            assert [size < SIZE for _, size in calls] == [True]
        assert {name for name, _ in calls} == {"AllReduce"}
