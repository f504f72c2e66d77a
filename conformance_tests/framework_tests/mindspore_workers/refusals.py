"""Refusals, and saved windows that resume."""

from __future__ import annotations

import gc
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn

import gradaccum
from gradaccum import ArgumentValueError, CheckpointError, UsageError
from gradaccum_mindspore import load_checkpoint_into, redistributed

from ..refusing import refused
from .checks import check
from .common import (
    WORLD,
    Worker,
    micro_batches,
    numbers,
    reference,
    require_equal,
    require_same_everywhere,
)


def sgd(value: float = 1.0, shape: int = 3, name: str = "p") -> nn.Optimizer:
    return nn.SGD(
        [Parameter(Tensor(np.full(shape, value), ms.float32), name=name)], 1.0
    )


@check
def each_mistake_is_refused(rank: int) -> None:
    """On every worker: their copies of the model would differ."""

    def closed_by_other_denominators() -> None:
        opt = gradaccum.wrap(sgd(), steps=None, data_parallel=True)
        opt((Tensor(np.ones(3), ms.float32),))
        opt.flush(denominator=3.0 + rank)

    def wrapped(steps: int = 2, **parameter: Any) -> None:
        gradaccum.wrap(sgd(**parameter), steps=steps, data_parallel=True)

    def wrapped_where_the_compiler_reduces() -> None:
        ms.set_auto_parallel_context(parallel_mode="semi_auto_parallel")
        try:
            wrapped()
        finally:
            ms.reset_auto_parallel_context()

    usage = UsageError
    value = ArgumentValueError
    mistakes = (
        (lambda: gradaccum.wrap(sgd(), steps=2), usage, "data_parallel=True"),
        (lambda: wrapped(steps=2 + rank), value, "options"),
        (lambda: wrapped(value=1.0 + rank), value, "parameters"),
        (lambda: wrapped(shape=3 + rank), value, "parameters"),
        (closed_by_other_denominators, usage, "several workers"),
        (wrapped_where_the_compiler_reduces, usage, "semi_auto_parallel"),
    )
    for call, kind, word in mistakes:
        with refused(kind, word):
            call()


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


def critics(steps: int) -> list[Any]:
    """Two wrapped optimizers of equal size."""
    return [
        gradaccum.wrap(sgd(name=name), steps=steps, data_parallel=True)
        for name in ("one", "two")
    ]


def values_of(opts: list[Any]) -> list[float]:
    return [float(opt.parameters[0].asnumpy()[0]) for opt in opts]


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
        with refused(UsageError, f"on rank {rank}", "optimizer"):
            opts[rank].flush() if flushes else opts[rank](gradient)
        for opt in opts:
            opt.flush()
        assert values_of(opts) == [0.0, 0.0]


@check
def compiled_windows_of_two_optimizers_never_meet(rank: int) -> None:
    """Compiled code skips both windows; Python raises as soon as it is asked."""
    gradient = (Tensor(np.ones(3), ms.float32),)
    opts = critics(steps=1)

    @ms.jit
    def first(gradient):
        return opts[rank]((gradient,))

    first(*gradient)
    with refused(UsageError, f"on rank {rank}", "optimizer"):
        print(opts[rank].result)
    assert values_of(opts) == [1.0, 1.0]
    for opt in opts:
        opt(gradient)
    assert values_of(opts) == [0.0, 0.0]


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
    first = micro_batches(0)
    second = micro_batches(1)
    require_equal(worker, reference([[*first[:3], second[0], second[2]]]))


@check
def open_window_of_others_is_refused(rank: int) -> None:
    """Another number of workers, or another worker's file."""
    own = files(rank, opened(rank).cell)
    with refused(CheckpointError, "redistributed"):
        load_checkpoint_into(Worker(steps=None, data_parallel=False).cell, own[rank])
    with refused(CheckpointError, f"rank {1 - rank}"):
        load_checkpoint_into(Worker(steps=None).cell, own[1 - rank])


@check
def any_worker_s_file_will_do_between_windows(rank: int) -> None:
    closed = opened(rank)
    closed.opt.flush()
    for options in ({}, {"data_parallel": False}):
        other = Worker(steps=None, **options)
        load_checkpoint_into(other.cell, files(rank, closed.cell)[1 - rank])
        assert numbers(other) == numbers(closed)
