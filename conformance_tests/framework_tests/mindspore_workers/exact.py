"""The window of two workers is the large batch of both, whatever each of them holds."""

from __future__ import annotations

import math

import mindspore as ms
import numpy as np

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

EVERY_OPTION = (
    {},
    {"clip_norm": 0.05},
    {"reduction": "sum"},
    {"loss_scale": 1024.0},
    {"accumulate_dtype": "float64"},
)


@check
def unequal_workers_make_the_large_batch(rank: int) -> None:
    """Numbers of items and of micro-batches differ; the second window is empty on one worker."""
    for options in EVERY_OPTION:
        worker, truth = Worker(**options).train(micro_batches(rank)), Truth()
        for window in all_windows():
            truth.window(window, **{name: value for name, value in options.items() if name in ("clip_norm", "reduction")})
        require_truth(worker, truth)
        assert worker.opt.result.optimizer_step == 2
        assert math.isclose(worker.opt.result.grad_norm, truth.norm, rel_tol=1e-5)
        require_same_everywhere((numbers(worker), worker.opt.result))


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
def missing_gradients_count_as_zeros(rank: int) -> None:
    """A parameter that took no part on one worker is divided by the weight of all."""
    worker = Worker(steps=None)
    gradients = [ms.Tensor(np.full(p.shape, 2.0 + rank), ms.float32) for p in worker.opt.parameters]
    worker.opt((gradients[0], None if rank else gradients[1]), 1.0 + rank)
    before = numbers(worker)
    worker.opt.flush()
    moved = [float((np.asarray(old) - np.asarray(new)).flat[0]) for old, new in zip(before, numbers(worker), strict=True)]
    np.testing.assert_allclose(moved, [0.1 * (2 * 1 + 3 * 2) / 3, 0.1 * 2 / 3], rtol=1e-5)


@check
def norm_to_skip_is_that_of_all(rank: int) -> None:
    truth = Truth()
    truth.window(all_windows()[0])
    for limit, applied in ((0.99 * truth.norm, False), (1.01 * truth.norm, True)):
        worker = Worker(steps=None, skip_norm=limit).train(micro_batches(rank)[:4])
        assert worker.opt.result.applied is applied


@check
def dropped_micro_batch_is_left_out(rank: int) -> None:
    worker = Worker(on_overflow="drop_micro_batch", loss_scale=gradaccum.DynamicLossScale(64.0))
    for index, batch in enumerate(micro_batches(rank)):
        worker.learn(batch, math.nan if rank == 0 and index == 0 else 1.0)
    worker.opt.flush()
    truth = Truth()
    first, second = all_windows()
    truth.window(first[1:])
    truth.window(second)
    require_truth(worker, truth)
    assert worker.opt.result.loss_scale == 32.0
    require_same_everywhere(worker.opt.result)


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


@check
def empty_windows_change_nothing(rank: int) -> None:
    worker = Worker()
    before = numbers(worker)
    worker.opt.flush()
    assert not worker.opt.result.closed
    assert numbers(worker) == before
