"""Refusals that every worker raises."""

from __future__ import annotations

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn

import gradaccum
from conformance_tests.framework_tests.mindspore_workers.checks import check
from conformance_tests.framework_tests.mindspore_workers.common import Worker, micro_batches, numbers
from conformance_tests.framework_tests.refusing import refused


def sgd(value: float = 1.0, shape: int = 3, name: str = "p") -> nn.Optimizer:
    return nn.SGD([Parameter(Tensor(np.full(shape, value), ms.float32), name=name)], 1.0)


@check
def several_workers_need_the_option(rank: int) -> None:
    """With communication and in MindSpore's data-parallel mode, where each worker would update its own copy of the model."""
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
def denominator_of_one_worker_is_refused(rank: int) -> None:
    """Each worker would divide the sum of all by its own, and the copies of the model would part."""
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


def fails(divisor: float) -> None:
    raise ZeroDivisionError


@check
def failed_update_is_not_reduced_twice(rank: int) -> None:
    """Not "mean": twice the sum over twice the weight would be the same."""
    sound, worker = Worker(reduction="sum"), Worker(reduction="sum")
    worker.opt.pynative_window.gradients = fails  # before the inner optimizer is called
    batches = [micro_batches(rank)[index % 3] for index in range(4)]
    for batch in batches:
        sound.learn(batch)
    with refused(ZeroDivisionError):
        for batch in batches:
            worker.learn(batch)
    with refused(gradaccum.UsageError, "flush()"):
        worker.learn(batches[0])
    del worker.opt.pynative_window.gradients
    assert worker.opt.flush()
    assert numbers(worker) == numbers(sound)
