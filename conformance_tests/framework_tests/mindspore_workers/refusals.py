"""Refusals, saved windows that resume, and the collectives of cross-entropy over class
shards.
"""

from __future__ import annotations

import gc
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn

import gradaccum
from conformance_tests.framework_tests.mindspore_workers.checks import check
from conformance_tests.framework_tests.mindspore_workers.common import (
    WORLD,
    Worker,
    micro_batches,
    numbers,
    reference,
    require_equal,
    require_same_everywhere,
)
from conformance_tests.framework_tests.refusing import refused
from gradaccum_mindspore import (
    load_checkpoint_into,
    redistributed,
)


def sgd(value: float = 1.0, shape: int = 3, name: str = "p") -> nn.Optimizer:
    return nn.SGD(
        [Parameter(Tensor(np.full(shape, value), ms.float32), name=name)], 1.0
    )


@check
def several_workers_need_the_option(rank: int) -> None:
    """Each worker would update its own copy of the model."""
    for mode in ("stand_alone", "data_parallel"):
        ms.set_auto_parallel_context(parallel_mode=mode)
        try:
            with refused(gradaccum.UsageError, "data_parallel=True", "False if"):
                gradaccum.wrap(sgd(), steps=2)
        finally:
            ms.reset_auto_parallel_context()


@check
def workers_that_differ_are_refused(rank: int) -> None:
    differences: tuple[tuple[str, dict[str, Any], dict[str, Any]], ...] = (
        ("options", {}, {"steps": 2 + rank}),
        ("options", {}, {"clip_norm": 1.0 + rank}),
        ("parameters", {"value": 1.0 + rank}, {}),
        ("parameters", {"shape": 3 + rank}, {}),
        ("parameters", {"name": "pq"[rank]}, {}),
    )
    for word, parameter, options in differences:
        given = {"steps": 2, "data_parallel": True, **options}
        with refused(gradaccum.ArgumentValueError, word, "on rank 1"):
            gradaccum.wrap(sgd(**parameter), **given)


@check
def marks_go_with_the_wrapper(rank: int) -> None:
    """MindSpore's reducer leaves marked parameters alone: a bare optimizer, after the
    wrapped ones, needs it.
    """
    inner = sgd()
    parameter = inner.parameters[0]
    wrapped = [
        gradaccum.wrap(each, steps=2, data_parallel=True)
        for each in (inner, nn.SGD([parameter], 1.0))
    ]
    while wrapped:
        assert parameter.layerwise_parallel
        wrapped.pop(0)
        gc.collect()
    assert not parameter.layerwise_parallel


@check
def denominator_of_one_worker_is_refused(rank: int) -> None:
    """The copies of the model would part."""
    opt = gradaccum.wrap(sgd(), steps=None, data_parallel=True)
    opt((Tensor(np.ones(3), ms.float32),))
    with refused(gradaccum.UsageError, "denominator", "several workers"):
        opt.flush(denominator=3.0 + rank)
    opt.flush()
    assert opt.parameters[0].asnumpy().tolist() == [0.0] * 3


def critics(steps: int) -> list[Any]:
    """Two wrapped optimizers of equal size."""
    return [
        gradaccum.wrap(sgd(name=name), steps=steps, data_parallel=True)
        for name in ("one", "two")
    ]


def held(opts: list[Any]) -> list[float]:
    return [float(opt.parameters[0].asnumpy()[0]) for opt in opts]


@check
def workers_may_stay_apart(rank: int) -> None:
    """With False each has windows of its own."""
    inner = sgd()
    opt = gradaccum.wrap(inner, steps=1, data_parallel=False)
    opt((Tensor(np.full(3, 1.0 + rank), ms.float32),))
    assert inner.parameters[0].asnumpy().tolist() == [-rank] * 3


@check
def windows_of_two_optimizers_never_meet(rank: int) -> None:
    """One worker ends a window of the first, or flushes it, while the other one does so
    with the second.
    """
    gradient = (Tensor(np.ones(3), ms.float32),)
    for flushes in (True, False):
        opts = critics(steps=2)
        for opt in opts:
            opt(gradient)
        with refused(gradaccum.UsageError, f"on rank {rank}", "optimizer"):
            opts[rank].flush() if flushes else opts[rank](gradient)
        for opt in opts:
            opt.flush()
        assert held(opts) == [0.0, 0.0]


@check
def compiled_windows_of_two_optimizers_never_meet(rank: int) -> None:
    """Compiled code skips both windows; Python raises as soon as it is asked."""
    gradient, opts = (Tensor(np.ones(3), ms.float32),), critics(steps=1)

    @ms.jit
    def first(gradient):
        return opts[rank]((gradient,))

    first(*gradient)
    with refused(gradaccum.UsageError, f"on rank {rank}", "optimizer"):
        print(opts[rank].result)
    assert held(opts) == [1.0, 1.0]
    for opt in opts:
        opt(gradient)
    assert held(opts) == [0.0, 0.0]


class Fails(nn.SGD):
    """An optimizer whose update raises once MindSpore compiles it."""

    def construct(self, gradients: Any) -> Any:
        return self.absent(gradients)


@check
def failed_update_leaves_the_window(rank: int) -> None:
    """It raises while MindSpore compiles the end, before anything is added up."""
    inner = Fails([Parameter(Tensor(np.ones(3), ms.float32), name="p")], 1.0)
    opt = gradaccum.wrap(inner, steps=None, data_parallel=True)
    opt((Tensor(np.ones(3), ms.float32),))
    with refused(AttributeError):
        opt.flush()
    assert opt.result.micro_step == 1
    assert opt.storage.sums[0].asnumpy().tolist() == [1.0] * 3
    opt.discard()
    opt((Tensor(np.ones(3), ms.float32),))
    assert opt.result.micro_step == 1


def files(rank: int, cell: nn.Cell) -> list[Any]:
    """What each worker saved, by rank."""
    ms.save_checkpoint(cell, f"open-{rank}.ckpt")
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
def window_of_four_goes_on_with_two(rank: int) -> None:
    """The four are those that the window of two was spread over."""
    four = redistributed(files(rank, opened(rank).cell), 4)
    worker = Worker(steps=None)
    load_checkpoint_into(worker.cell, redistributed(four, WORLD)[rank])
    worker.train([micro_batches(rank)[2]])
    first, second = micro_batches(0), micro_batches(1)
    require_equal(worker, reference([[*first[:3], second[0], second[2]]]))


@check
def open_window_of_others_is_refused(rank: int) -> None:
    """Another number of workers, or another worker's file."""
    own = files(rank, opened(rank).cell)
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
        load_checkpoint_into(other.cell, files(rank, closed.cell)[1 - rank])
        assert numbers(other) == numbers(closed)
