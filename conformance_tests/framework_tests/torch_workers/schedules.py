"""Events once per update, on a worker whose last windows all close in one `flush`."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import StepLR

import gradaccum
from conformance_tests.framework_tests.refusing import refused
from conformance_tests.framework_tests.torch_workers.checks import check
from conformance_tests.framework_tests.torch_workers.common import (
    all_windows,
    build,
    learn,
    micro_batches,
    require_equal,
    require_same_everywhere,
    sgd,
)

AVERAGE = torch.optim.swa_utils.get_ema_multi_avg_fn(0.5)
HALVE: dict[str, Any] = {"step_size": 1, "gamma": 0.5}


def averaged(model: nn.Module) -> torch.optim.swa_utils.AveragedModel:
    return torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=AVERAGE)


def reference() -> tuple[nn.Module, nn.Module]:
    """One process with all micro-batches: the model, and its average over the updates."""
    model = build()
    opt, average = gradaccum.wrap(sgd(model), steps=None), averaged(model)
    schedule = StepLR(opt, **HALVE)
    for window in all_windows(steps=2):
        for batch in window:
            learn(model, opt, batch)
        opt.flush()
        schedule.step()
        average.update_parameters(model)
    assert opt.result.optimizer_step == 3
    return model, average


def trained(rank: int, follow: Any) -> tuple[nn.Module, nn.Module, Any]:
    """The share of one worker; ``follow(opt)`` is called first and returns what the loop calls after each micro-batch and after `flush`."""
    model = build()
    parallel = DistributedDataParallel(model, find_unused_parameters=True)
    opt, average = gradaccum.wrap(sgd(model), steps=2, module=parallel), averaged(model)
    opt.add_listener(lambda window: average.update_parameters(model) if window.applied else None)
    after = follow(opt)
    for call in (*(partial(learn, parallel, opt, batch) for batch in micro_batches(rank)), opt.flush):
        call()
        after()
    return model, average, opt


@check
def schedules_and_averages_move_once_per_update(rank: int) -> None:
    """One worker closes its three windows by ``step``; the other closes one so, and two in one ``flush``."""

    def gated(opt: Any) -> Any:
        return gradaccum.wrap(StepLR(opt, **HALVE)).step

    def listening(opt: Any) -> Any:
        schedule = StepLR(opt, **HALVE)
        opt.add_listener(lambda window: schedule.step() if window.applied else None)
        return lambda: None

    for follow in (gated, listening):
        model, average, opt = trained(rank, follow)
        expected, expected_average = reference()
        require_equal(model, expected)
        require_equal(average, expected_average)
        assert opt.param_groups[0]["lr"] == 0.1 * 0.5**3
        require_same_everywhere(opt.result)


@check
def schedules_that_drift_apart_are_refused(rank: int) -> None:
    """A schedule that looks at ``result`` after `flush` sees the last window alone. All workers raise, before the update."""

    def by_hand(opt: Any) -> Any:
        schedule = StepLR(opt, **HALVE)
        opts.append(opt)
        return lambda: schedule.step() if opt.result.applied else None

    opts: list[Any] = []
    with refused(gradaccum.UsageError, f"learning rates on rank {rank}", "listener", "0.025" if rank == 0 else "0.05"):
        trained(rank, by_hand)
    assert opts[0].result.optimizer_step == 2
    for group in opts[0].param_groups:
        group["lr"] = 0.025
    opts[0].flush()
    assert opts[0].result.optimizer_step == 3, "the sums are as they were"
    require_same_everywhere([group["params"][0].tolist() for group in opts[0].param_groups])


@check
def failing_listener_keeps_the_other_windows(rank: int) -> None:
    """It hears of each window, though it raised at the one before, and `flush` raises when every window is closed."""
    model, heard = build(), []
    parallel = DistributedDataParallel(model, find_unused_parameters=True)
    opt = gradaccum.wrap(sgd(model), steps=2, module=parallel)

    def fail(window: Any) -> None:
        heard.append(window.optimizer_step)
        raise ZeroDivisionError

    for batch in micro_batches(rank)[: 2 * (1 - rank) * 3]:
        opt.add_listener(heard.append).remove()
        learn(parallel, opt, batch)
    if rank == 0:
        return opt.flush()
    opt.add_listener(fail)
    with refused(ZeroDivisionError):
        opt.flush()
    assert heard == [1, 2, 3]
