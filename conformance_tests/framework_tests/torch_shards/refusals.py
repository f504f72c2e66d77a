"""Refusals that every worker raises, before anything is lost."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

import gradaccum
from conformance_tests.framework_tests.refusing import refused

from .common import (
    WAYS,
    Way,
    alone,
    batches,
    build,
    check,
    learn,
    mesh_of,
    require_equal,
    sgd,
    sharded,
    train,
    windows_of,
    wrap,
)

WINDOW = Way("window", (2,))


@check
def wrong_arguments(rank: int) -> None:
    model, other = sharded(WINDOW), sharded(WINDOW)
    for sync, kind in (
        ("windows", gradaccum.ArgumentValueError),
        (True, gradaccum.ArgumentTypeError),
    ):
        with refused(kind, "gradient_sync", "micro_batch"):
            gradaccum.wrap(sgd(model), steps=2, module=model, gradient_sync=sync)
    with refused(gradaccum.ArgumentValueError, "gradient_sync", "module="):
        gradaccum.wrap(sgd(model), steps=2, gradient_sync="window")
    with refused(gradaccum.ArgumentValueError, "gradient_sync", "fully_shard"):
        gradaccum.wrap(sgd(build()), steps=2, gradient_sync="window")
    with refused(gradaccum.ArgumentTypeError, "module", "fully_shard"):
        gradaccum.wrap(sgd(build()), steps=2, module=build())
    with refused(gradaccum.ArgumentValueError, "module", "8 of them"):
        gradaccum.wrap(sgd(other), steps=2, module=model)
    with refused(gradaccum.ArgumentValueError, "options", "on rank 1"):
        gradaccum.wrap(sgd(model), steps=2 + rank, module=model)
    with refused(gradaccum.ArgumentValueError, "options", "on rank 1"):
        gradaccum.wrap(
            sgd(model),
            steps=2,
            module=model,
            gradient_sync="window" if rank else "micro_batch",
        )


@check
def windows_that_need_one_worker(rank: int) -> None:
    """Each worker sees its own weight."""
    model = sharded(WINDOW)
    for steps in (gradaccum.until_weight(8), gradaccum.until_weight(lambda step: 8)):
        with refused(gradaccum.UsageError, "until_weight", "flush()"):
            wrap(model, WINDOW, steps=steps)


@check
def sums_that_fsdp_would_round(rank: int) -> None:
    halves = sharded(WINDOW, torch.bfloat16)
    with refused(gradaccum.ArgumentValueError, "bfloat16", "MixedPrecisionPolicy"):
        wrap(halves, WINDOW)
    singles = sharded(WINDOW, torch.float32)
    with refused(gradaccum.ArgumentValueError, "float64", "accumulate_dtype"):
        wrap(singles, WINDOW, accumulate_dtype="float64")
    with refused(gradaccum.ArgumentValueError, "drop_micro_batch"):
        wrap(singles, WINDOW, on_overflow="drop_micro_batch")
    with refused(gradaccum.ArgumentValueError, "two dimensions"):
        wrap(singles, Way("all_reduce_per_window", (2,)))
    flat = sharded(Way("", (1, 2)))
    with refused(gradaccum.ArgumentValueError, "all-reduced"):
        wrap(flat, Way("all_reduce_per_window", (1, 2)))


@check
def parameters_that_nobody_reduces(rank: int) -> None:
    model = build()
    fully_shard(model.first, mesh=mesh_of((2,)))
    with refused(
        gradaccum.ArgumentValueError, "6 trainable parameters", "fully_shard(model)"
    ):
        gradaccum.wrap(sgd(model), steps=2)
    for layer in (model.usual, model.rare, model.never):
        layer.requires_grad_(False)
    gradaccum.wrap(sgd(model), steps=2)
    shared = sharded(WINDOW)
    part = torch.optim.SGD(shared.usual.parameters(), lr=0.1)
    with refused(gradaccum.ArgumentValueError, "another optimizer"):
        gradaccum.wrap(part, steps=2, module=shared, gradient_sync="window")


@check
def parameters_on_different_workers(rank: int) -> None:
    """Plain experts on a part of the workers: their norm would be that of this part."""
    model = build()
    for expert in (model.usual, model.rare):
        fully_shard(expert, mesh=DeviceMesh("cpu", [rank]))
    fully_shard(model, mesh=mesh_of((2,)))
    for options in ({}, {"clip_norm": 0.1}):
        with refused(
            gradaccum.ArgumentValueError, "optimizer", "same workers", "DTensor"
        ):
            gradaccum.wrap(sgd(model), steps=2, **options)
    gradaccum.wrap(sgd(model), steps=2, on_overflow="ignore")


@check
def parameters_that_fsdp1_has_flattened(rank: int) -> None:
    """Each worker would take the norm of its own part."""
    for original in (False, True):
        model = FullyShardedDataParallel(
            build(), use_orig_params=original, device_id=torch.device("cpu")
        )
        for options in ({}, {"separate_sums": True}):
            with refused(
                gradaccum.ArgumentValueError, "optimizer", "FSDP1", "fully_shard"
            ):
                gradaccum.wrap(sgd(model), steps=2, **options)


@check
def two_engines_in_one_optimizer(rank: int) -> None:
    shards, copies = sharded(WINDOW), nn.parallel.DistributedDataParallel(build())
    both = torch.optim.SGD([*shards.parameters(), *copies.parameters()], lr=0.1)
    with refused(
        gradaccum.ArgumentValueError, "fully_shard", "an optimizer of their own"
    ):
        gradaccum.wrap(both, steps=2, module=copies)


@check
def copies(rank: int) -> None:
    for way in WAYS:
        model = sharded(way)
        opt = wrap(model, way, steps=1)
        for call in (pickle.dumps, copy.deepcopy):
            with refused(gradaccum.UsageError, "state_dict()"):
                call(opt)


@check
def second_derivatives(rank: int) -> None:
    """FSDP2's reduction has no graph."""
    for way in WAYS:
        model = sharded(way)
        opt = wrap(model, way)
        loss = model(batches(rank)[0][0]).square().mean()
        with refused(gradaccum.UsageError, "create_graph"):
            opt.backward(loss, create_graph=True)
        opt.backward(loss)
        opt.step()


@check
def discard_on_one_worker(rank: int) -> None:
    for way in WAYS:
        model = sharded(way)
        opt = wrap(model, way, steps=None)
        train(model, opt, rank, 2)
        if rank == 1:
            opt.discard()
        learn(model, opt, batches(rank)[2])
        with refused(gradaccum.UsageError, "as many micro-batches", "opt.discard()"):
            opt.flush()
        opt.discard()
        train(model, opt, rank, 3)
        opt.flush()
        require_equal(model, alone(windows_of((3,)))[0])


@check
def changed_gradients(rank: int) -> None:
    """After a checkpoint a part of the sum is in ``.grad``, and is watched."""

    def write(model: Any) -> None:
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.to_local().mul_(0.5)

    for way in (way for way in WAYS if way.sync != "micro_batch"):
        for change, fix in (
            (nn.Module.zero_grad, "opt.zero_grad()"),
            (write, "clip_norm"),
        ):
            model = sharded(way)
            opt = wrap(model, way)
            learn(model, opt, batches(rank)[0])
            opt.state_dict()
            assert any(parameter.grad is not None for parameter in model.parameters())
            change(model)
            with refused(gradaccum.UsageError, ".grad", fix):
                learn(model, opt, batches(rank)[1])
            opt.discard()
            train(model, opt, rank, 3)
            require_equal(model, alone(windows_of((3,)))[0])


@check
def other_learning_rates_on_one_worker(rank: int) -> None:
    for way in WAYS[:2]:
        model = sharded(way)
        opt = wrap(model, way, steps=None)
        for batch in batches(rank, 3):
            learn(model, opt, batch)
        opt.param_groups[0]["lr"] *= 1 + rank
        with refused(
            gradaccum.UsageError,
            f"learning rates on rank {rank}",
            "the same rates",
        ):
            opt.flush()
        opt.param_groups[0]["lr"] /= 1 + rank
        opt.flush()
        require_equal(model, alone(windows_of((3,)))[0])


@check
def parameters_of_another_unit(rank: int) -> None:
    """They are divided as the others are; where FSDP2 waits, it was not told to wait
    for them.
    """
    for way in WAYS[:2]:
        model = sharded(way)
        inner = torch.optim.SGD(
            model.first.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1
        )
        opt = gradaccum.wrap(inner, steps=None, module=model, gradient_sync=way.sync)
        with refused(gradaccum.ArgumentValueError, "fully_shard"):
            opt.add_param_group({"params": nn.Linear(2, 2).parameters()})
        rest = [
            each
            for name, each in model.named_parameters()
            if not name.startswith("first")
        ]
        if way.sync == "window":
            with refused(gradaccum.ArgumentValueError, "param_group", "gradient_sync="):
                opt.add_param_group({"params": rest})
            assert len(opt.param_groups) == 1
            continue
        opt.add_param_group({"params": rest})
        for batch in batches(rank, 3):
            learn(model, opt, batch)
        opt.flush()
        require_equal(model, alone(windows_of((3,)))[0])
