"""Refusals, saved windows that resume, and the collectives of cross-entropy over class
shards.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn

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
    """With communication and in MindSpore's data-parallel mode, where each worker would
    update its own copy of the model.
    """
    with refused(gradaccum.UsageError, "data_parallel", "data_parallel=True"):
        gradaccum.wrap(sgd(), steps=2)
    ms.set_auto_parallel_context(parallel_mode="data_parallel")
    try:
        with refused(gradaccum.UsageError, "data_parallel", "data_parallel=True"):
            gradaccum.wrap(sgd(), steps=2)
    finally:
        ms.reset_auto_parallel_context()
    with refused(gradaccum.ArgumentTypeError, "data_parallel"):
        gradaccum.wrap(sgd(), steps=2, data_parallel="yes")


@check
def workers_that_differ_are_refused(rank: int) -> None:
    with refused(gradaccum.ArgumentValueError, "options", "on rank 1"):
        gradaccum.wrap(sgd(), steps=2 + rank, data_parallel=True)
    with refused(gradaccum.ArgumentValueError, "options", "on rank 1"):
        gradaccum.wrap(sgd(), steps=2, clip_norm=1.0 + rank, data_parallel=True)
    for different in ({"value": 1.0 + rank}, {"shape": 3 + rank}, {"name": "pq"[rank]}):
        with refused(gradaccum.ArgumentValueError, "parameters", "on rank 1"):
            gradaccum.wrap(sgd(**different), steps=2, data_parallel=True)
    gradaccum.wrap(sgd(), steps=2, data_parallel=True)


@check
def marks_go_with_the_wrapper(rank: int) -> None:
    """MindSpore's reducer leaves marked parameters alone: a bare optimizer, after the
    wrapped one or after a wrap that was refused, needs it.
    """
    inner = sgd()
    parameter = inner.parameters[0]
    opt = gradaccum.wrap(inner, steps=2, data_parallel=True)
    assert parameter.layerwise_parallel
    again = gradaccum.wrap(nn.SGD([parameter], 1.0), steps=2, data_parallel=True)
    del opt
    gc.collect()
    assert parameter.layerwise_parallel
    del again
    gc.collect()
    assert not parameter.layerwise_parallel
    inner = sgd(name="gradaccum.p")
    with refused(gradaccum.ArgumentValueError, "name"):
        gradaccum.wrap(inner, steps=2, data_parallel=True)
    assert not inner.parameters[0].layerwise_parallel


@check
def denominator_of_one_worker_is_refused(rank: int) -> None:
    """Each worker would divide the sum of all by its own, and the copies of the model
    would part.
    """
    inner = sgd()
    opt = gradaccum.wrap(inner, steps=None, data_parallel=True)
    opt((Tensor(np.ones(3), ms.float32),))
    with refused(gradaccum.UsageError, "denominator", "several workers"):
        opt.flush(denominator=3.0 + rank)
    opt.flush()
    assert inner.parameters[0].asnumpy().tolist() == [0.0] * 3


@check
def workers_may_stay_apart(rank: int) -> None:
    """With False each has windows of its own."""
    inner = sgd()
    opt = gradaccum.wrap(inner, steps=1, data_parallel=False)
    opt((Tensor(np.full(3, 1.0 + rank), ms.float32),))
    assert inner.parameters[0].asnumpy().tolist() == [-rank] * 3


@check
def windows_of_two_optimizers_never_meet(rank: int) -> None:
    """Two critics of equal size. One worker's data end early, so that it flushes the
    first critic while the other ends a window of the second.
    """
    for flushes, steps in ((True, 2), (False, 2)):
        critics = [sgd(name=name) for name in ("one", "two")]
        opts = [
            gradaccum.wrap(each, steps=steps, data_parallel=True) for each in critics
        ]
        gradient = (Tensor(np.ones(3), ms.float32),)
        for opt in opts:
            opt(gradient)
        first = opts[rank]
        with refused(gradaccum.UsageError, f"on rank {rank}", "weight=0"):
            if flushes:
                first.flush()
            else:
                first(gradient)
        held = [opt.result.micro_step for opt in opts]
        assert held == [1 + (not flushes and opt is first) for opt in opts]
        for opt in opts:
            opt.flush()
        assert [each.parameters[0].asnumpy().tolist() for each in critics] == [
            [0.0] * 3
        ] * 2


@check
def compiled_windows_of_two_optimizers_never_meet(rank: int) -> None:
    """Compiled code skips both windows; Python raises as soon as it is asked."""
    critics = [sgd(name=name) for name in ("one", "two")]
    opts = [gradaccum.wrap(each, steps=1, data_parallel=True) for each in critics]

    @ms.jit
    def first(gradient):
        return opts[rank]((gradient,))

    first(Tensor(np.ones(3), ms.float32))
    with refused(gradaccum.UsageError, f"on rank {rank}", "weight=0"):
        print(opts[rank].result)
    assert [each.parameters[0].asnumpy().tolist() for each in critics] == [
        [1.0] * 3
    ] * 2
    for opt in opts:
        opt((Tensor(np.ones(3), ms.float32),))
    assert [each.parameters[0].asnumpy().tolist() for each in critics] == [
        [0.0] * 3
    ] * 2


def fail_once(worker: Worker, batches: Sequence[Any]) -> None:
    """Let the update of a window raise, before the inner optimizer is called: it takes
    no micro-batch more.
    """

    def fails(divisor: float) -> None:
        raise ZeroDivisionError

    worker.opt.pynative_window.gradients = fails
    with refused(ZeroDivisionError):
        for batch in batches:
            worker.learn(batch)
    with refused(gradaccum.UsageError, "flush()"):
        worker.learn(batches[0])
    del worker.opt.pynative_window.gradients


@check
def failed_update_is_not_reduced_twice(rank: int) -> None:
    """Not "mean": twice the sum over twice the weight would be the same."""
    sound, worker = Worker(reduction="sum"), Worker(reduction="sum")
    batches = [micro_batches(rank)[index % 3] for index in range(4)]
    for batch in batches:
        sound.learn(batch)
    fail_once(worker, batches)
    assert worker.opt.flush()
    assert numbers(worker) == numbers(sound)


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
def window_of_two_goes_on_with_one(rank: int) -> None:
    (state,) = redistributed(files(rank, opened(rank).cell), 1)
    alone, truth = Worker(steps=None, data_parallel=False), Truth()
    load_checkpoint_into(alone.cell, state)
    alone.train([micro_batches(0)[2]])
    truth.window([*micro_batches(0)[:3], micro_batches(1)[0]])
    require_truth(alone, truth)


@check
def window_of_four_goes_on_with_two(rank: int) -> None:
    """The four are those that the window of two was spread over."""
    four = redistributed(files(rank, opened(rank).cell), 4)
    worker, truth = Worker(steps=None), Truth()
    load_checkpoint_into(worker.cell, redistributed(four, WORLD)[rank])
    worker.train([micro_batches(rank)[2]])
    truth.window([*micro_batches(0)[:3], micro_batches(1)[0], micro_batches(1)[2]])
    require_truth(worker, truth)
    require_same_everywhere((numbers(worker), worker.opt.result))


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
