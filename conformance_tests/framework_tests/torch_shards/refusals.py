"""Refusals that every worker raises, before anything is lost."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

import gradaccum
from gradaccum import ArgumentValueError, UsageError

from ..refusing import refused
from .common import (
    FLAT,
    WAYS,
    batches,
    build,
    check,
    each_way,
    learn,
    mesh_of,
    require_first_window,
    sgd,
    sharded,
    train,
    wrap,
)


def plain(model: nn.Module, **options: Any) -> Any:
    return gradaccum.wrap(sgd(model), **{"steps": 2, **options})


def partly_sharded() -> Any:
    model = build()
    fully_shard(model.first, mesh=mesh_of((2,)))
    return model


def flattened() -> Any:
    """Each worker would take the norm of its own part."""
    return FullyShardedDataParallel(build(), device_id=torch.device("cpu"))


def in_window(model: Any, **options: Any) -> Any:
    return plain(model, module=model, **{"gradient_sync": "window", **options})


def flat(**options: Any) -> Any:
    return sharded(FLAT, **options)


NOT_WRAPPED = [
    (
        lambda _: plain(flat(), module=flat()),
        ArgumentValueError,
        ("module", "8 of these parameters"),
    ),
    (
        lambda rank: wrap(sharded(WAYS[rank]), WAYS[rank]),
        ArgumentValueError,
        ("options", "on rank 1"),
    ),
    # Each worker sees its own weight.
    (
        lambda _: plain(flat(), steps=gradaccum.until_weight(8)),
        UsageError,
        ("until_weight", "flush()"),
    ),
    # No gradient of a micro-batch by itself.
    (
        lambda _: gradaccum.check_loop(build, sgd(model := flat()), model, []),
        UsageError,
        ("optimizer", "without fully_shard"),
    ),
    (
        lambda _: gradaccum.verify(flat(), plain, (torch.ones(2, 4),)),
        UsageError,
        ("model", "without fully_shard"),
    ),
    # FSDP2 would round the sums.
    (
        lambda _: in_window(flat(dtype=torch.bfloat16)),
        ArgumentValueError,
        ("bfloat16", "MixedPrecisionPolicy"),
    ),
    (
        lambda _: in_window(flat(dtype=torch.float32), accumulate_dtype="float64"),
        ArgumentValueError,
        ("float64", "accumulate_dtype"),
    ),
    (
        lambda _: in_window(flat(), on_overflow="drop_micro_batch"),
        ArgumentValueError,
        ("drop_micro_batch",),
    ),
    (
        lambda _: plain(partly_sharded()),
        ArgumentValueError,
        ("6 trainable parameters", "fully_shard(model)"),
    ),
    # The norm would be that of one worker.
    (
        lambda _: plain(flat(), process_group=mesh_of((2, 1)).get_group("shard")),
        ArgumentValueError,
        ("optimizer", "a parameter sharded over ranks [0, 1]"),
    ),
    (lambda _: plain(flattened()), ArgumentValueError, ("FSDP1", "fully_shard")),
]


@check
def what_cannot_be_wrapped_is_refused(rank: int) -> None:
    for call, kind, words in NOT_WRAPPED:
        with refused(kind, *words):
            call(rank)


@check
def other_windows_on_one_worker(rank: int) -> None:
    """One that is discarded there, and other learning rates."""
    for _, model, opt in each_way(steps=None):
        train(model, opt, rank, 2)
        if rank == 1:
            opt.discard()
        learn(model, opt, batches(rank)[2])
        with refused(UsageError, "a different number of micro-batches"):
            opt.flush()
        opt.discard()
        train(model, opt, rank, 3)
        opt.param_groups[0]["lr"] *= 1 + rank
        with refused(UsageError, f"learning rates on rank {rank}", "the same rates"):
            opt.flush()
        opt.param_groups[0]["lr"] /= 1 + rank
        opt.discard()
        require_first_window(model, opt, rank)


@check
def changed_gradients(rank: int) -> None:
    """After a checkpoint a part of a deferred sum is in ``.grad`` too."""
    for _, model, opt in each_way():
        opt.backward(model(batches(rank)[0][0]).sum() * math.nan)  # Is no change.
        opt.step()
        opt.discard()
        train(model, opt, rank, 1)
        opt.state_dict()
        model.zero_grad()
        with refused(UsageError, ".grad", "opt.zero_grad()"):
            opt.flush()
        opt.discard()
        train(model, opt, rank, 1)
        opt.state_dict()
        opt.backward(model(batches(rank)[1][0]).square().mean(), weight=1)
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        with refused(UsageError, ".grad", "clip_norm"):
            opt.step()
        opt.discard()
