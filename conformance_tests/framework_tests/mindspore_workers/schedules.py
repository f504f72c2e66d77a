"""Events once per update, on a worker whose last windows all close in one `flush`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops
from mindspore.experimental import optim
from mindspore.experimental.optim.lr_scheduler import StepLR

import gradaccum
from conformance_tests.framework_tests.mindspore_common import set_mode
from conformance_tests.framework_tests.mindspore_workers.checks import check
from conformance_tests.framework_tests.mindspore_workers.common import WORLD, Worker, micro_batches, numbers, require_same_everywhere
from conformance_tests.framework_tests.refusing import refused

STEPS = 2
"""Of 6 and 3 micro-batches: one worker closes its three windows by itself, the other one so, and two in one `flush`."""
Follow = Callable[[Any], Callable[[], object]]


class Average:
    """Of the parameters, over the updates."""

    def __init__(self, worker: Worker) -> None:
        self.worker, self.value = worker, np.concatenate([np.ravel(each) for each in numbers(worker)])

    def __call__(self, window: object = None) -> None:
        self.value = 0.5 * self.value + 0.5 * np.concatenate([np.ravel(each) for each in numbers(self.worker)])


def reference() -> tuple[Worker, Average]:
    """One process with all micro-batches."""
    worker = Worker(steps=None, data_parallel=False, inner=optim.SGD)
    average, schedule, workers = Average(worker), StepLR(worker.opt, 1, 0.5), [micro_batches(rank) for rank in range(WORLD)]
    for first in range(0, 6, STEPS):
        worker.train([batch for own in workers for batch in own[first : first + STEPS]])
        schedule.step()
        average()
    assert worker.opt.result.optimizer_step == 3
    return worker, average


def trained(mode: str, rank: int, follow: Follow) -> tuple[Worker, Average]:
    """The share of one worker; ``follow(opt)`` is called first and returns what the loop calls after each micro-batch and after `flush`."""
    worker = Worker(mode, steps=STEPS, inner=optim.SGD)
    average = Average(worker)
    worker.opt.add_listener(average)
    after = follow(worker.opt)
    for call in (*(partial(worker.learn, batch) for batch in micro_batches(rank)), worker.opt.flush):
        call()
        assert worker.opt.result.micro_step < STEPS
        after()
    return worker, average


@check
def schedules_and_averages_move_once_per_update(rank: int) -> None:
    """By a gate, and by a listener."""

    def gated(opt: Any) -> Callable[[], object]:
        step: Callable[[], object] = gradaccum.wrap(StepLR(opt, 1, 0.5)).step
        return step

    def listening(opt: Any) -> Callable[[], object]:
        schedule = StepLR(opt, 1, 0.5)
        opt.add_listener(lambda window: schedule.step() if window.applied else None)
        return lambda: None

    expected, expected_average = reference()
    for mode, follow in (("pynative", gated), ("pynative", listening), ("jit", gated), ("graph", listening)):
        worker, average = trained(mode, rank, follow)
        for found, truth in zip(numbers(worker), numbers(expected), strict=True):
            np.testing.assert_allclose(found, truth, rtol=0, atol=3e-6)
        np.testing.assert_allclose(average.value, expected_average.value, rtol=0, atol=3e-6)
        np.testing.assert_allclose(float(worker.opt.param_groups[0]["lr"]), 0.1 * 0.5**3, rtol=1e-6)
        require_same_everywhere((numbers(worker), worker.opt.result, average.value.tolist()))


@check
def schedules_that_drift_apart_are_refused(rank: int) -> None:
    """A schedule that looks at ``result`` after `flush` sees the last window alone. All workers raise, before the update."""
    worker = Worker(steps=STEPS, inner=optim.SGD)
    schedule = StepLR(worker.opt, 1, 0.5)
    with refused(gradaccum.UsageError, f"learning rates on rank {rank}", "listener", "0.025" if rank == 0 else "0.05"):
        for call in (*(partial(worker.learn, batch) for batch in micro_batches(rank)), worker.opt.flush):
            call()
            if worker.opt.result.applied:
                schedule.step()
    assert worker.opt.result.optimizer_step == 2
    ops.assign(worker.opt.param_groups[0]["lr"], Tensor(0.025, ms.float32))
    worker.opt.flush()
    assert worker.opt.result.optimizer_step == 3, "the sums are as they were"
    require_same_everywhere(numbers(worker))


@check
def other_rates_in_compiled_code_skip_the_window(rank: int) -> None:
    """It cannot raise. Python raises as soon as it is asked, on every worker: the one in compiled code and the one that flushes."""
    for mode, inner in (("graph", optim.SGD), ("jit", nn.Momentum)):
        worker = Worker(mode, steps=STEPS, inner=inner)
        rate = worker.opt.lrs[0] if inner is optim.SGD else worker.opt.learning_rate
        batches, start = micro_batches(rank), numbers(worker)
        ops.assign(rate, rate.value() * (1 + rank))
        with refused(gradaccum.UsageError, f"learning rates on rank {rank}", "listener"):
            if rank == 0:
                for batch in batches[:STEPS]:
                    worker.learn(batch)
            else:
                worker.learn(batches[0])
                worker.opt.flush()
            print(worker.opt.result)
        set_mode(mode if mode == "graph" else "pynative")
        if rank == 0:
            worker.opt.flush()
        assert (worker.opt.result.optimizer_step, worker.opt.result.overflow, numbers(worker)) == (0, True, start)
        ops.assign(rate, rate.value() / (1 + rank))
        for batch in batches[:STEPS]:
            worker.learn(batch)
        assert worker.opt.result.applied
        require_same_everywhere(numbers(worker))
