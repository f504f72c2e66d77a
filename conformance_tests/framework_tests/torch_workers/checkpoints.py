"""A saved window goes on."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import gradaccum
from conformance_tests.framework_tests.refusing import refused
from conformance_tests.framework_tests.torch_workers.checks import check
from conformance_tests.framework_tests.torch_workers.common import (
    WORLD,
    all_windows,
    alone,
    build,
    learn,
    micro_batches,
    require_equal,
    sgd,
)
from gradaccum_torch import redistributed


@check
def window_of_another_worker_is_refused(rank: int) -> None:
    """A job that saves on its first worker only would double that one's sum."""
    model = build()
    parallel = DistributedDataParallel(model, find_unused_parameters=True)
    opt = gradaccum.wrap(sgd(model), steps=4, module=parallel)
    learn(parallel, opt, micro_batches(rank)[0])
    saved: list[Any] = [None] * WORLD
    dist.all_gather_object(saved, opt.state_dict())
    with refused(gradaccum.CheckpointError, f"rank {rank} of 2", f"rank {1 - rank} of 2", "redistributed"):
        opt.load_state_dict(saved[1 - rank])
    opt.load_state_dict(saved[rank])
    opt.flush()
    require_equal(model, alone([[micro_batches(0)[0], micro_batches(1)[0]]])[0])


@check
def distributed_checkpoint_keeps_closed_windows_only(rank: int) -> None:
    """It would save one copy of a sum that is another one on each worker."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict  # Its import takes a second.

    model = build()
    parallel = DistributedDataParallel(model, find_unused_parameters=True)
    opt = gradaccum.wrap(sgd(model), steps=4, module=parallel)
    learn(parallel, opt, micro_batches(rank)[1])
    with refused(gradaccum.UsageError, "redistributed"):
        get_optimizer_state_dict(model, opt)
    opt.flush()
    state = get_optimizer_state_dict(model, opt)
    set_optimizer_state_dict(model, opt, state)
    assert opt.result.optimizer_step == 1


@check
def window_of_two_goes_on_with_one(rank: int) -> None:
    model = build()
    parallel = DistributedDataParallel(model, find_unused_parameters=True)
    opt = gradaccum.wrap(sgd(model), steps=None, module=parallel, clip_norm=0.05)
    for batch in micro_batches(rank)[:2]:
        learn(parallel, opt, batch)
    saved: list[Any] = [None] * WORLD
    dist.all_gather_object(saved, opt.state_dict())
    opt = gradaccum.wrap(sgd(model), steps=None, clip_norm=0.05)
    opt.load_state_dict(redistributed(saved, 1)[0])
    for batch in (*micro_batches(0)[2:4], *micro_batches(1)[2:]):
        learn(model, opt, batch)
    opt.flush()
    require_equal(model, alone(all_windows()[:1], clip_norm=0.05)[0])
