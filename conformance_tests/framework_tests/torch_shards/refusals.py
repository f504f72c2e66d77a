"""Refusals that every worker raises, before anything is lost."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import (
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)

import gradaccum
import gradaccum_torch
from conformance_tests.framework_tests.refusing import refused
from gradaccum import ArgumentValueError, UsageError

from .common import (
    FLAT,
    WAYS,
    WINDOW,
    alone,
    batches,
    build,
    check,
    each_way,
    learn,
    mesh_of,
    require_equal,
    require_first_window,
    sgd,
    sharded,
    train,
    windows_of,
    wrap,
)


def plain(model: nn.Module, **options: Any) -> Any:
    return gradaccum.wrap(sgd(model), **{"steps": 2, **options})


def partly_sharded() -> Any:
    model = build()
    fully_shard(model.first, mesh=mesh_of((2,)))
    return model


def experts(rank: int) -> Any:
    """Plain ones on a part of the workers: their norm would be that of this part."""
    model = build()
    for expert in (model.usual, model.rare):
        fully_shard(expert, mesh=DeviceMesh("cpu", [rank]))
    return fully_shard(model, mesh=mesh_of((2,)))


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
        ("module", "8 of them"),
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
    (
        lambda rank: plain(experts(rank)),
        ArgumentValueError,
        ("optimizer", "same workers", "DTensor"),
    ),
    (lambda _: plain(flattened()), ArgumentValueError, ("FSDP1", "fully_shard")),
]


@check
def what_cannot_be_wrapped_is_refused(rank: int) -> None:
    for call, kind, words in NOT_WRAPPED:
        with refused(kind, *words):
            call(rank)
    model = partly_sharded()
    for layer in (model.usual, model.rare, model.never):
        layer.requires_grad_(False)
    plain(model)
    plain(experts(rank), on_overflow="ignore")


@check
def other_windows_on_one_worker(rank: int) -> None:
    """One that is discarded there, and other learning rates."""
    for _, model, opt in each_way(steps=None):
        train(model, opt, rank, 2)
        if rank == 1:
            opt.discard()
        learn(model, opt, batches(rank)[2])
        with refused(UsageError, "another window elsewhere"):
            opt.flush()
        opt.discard()
        train(model, opt, rank, 3)
        opt.param_groups[0]["lr"] *= 1 + rank
        with refused(UsageError, f"learning rates on rank {rank}", "the same rates"):
            opt.flush()
        opt.param_groups[0]["lr"] /= 1 + rank
        opt.discard()
        train(model, opt, rank, 3)
        opt.flush()
        require_equal(model, alone(windows_of((3,)))[0])


@check
def changed_gradients(rank: int) -> None:
    """After a checkpoint a part of a deferred sum is in ``.grad`` too."""
    for _, model, opt in each_way():
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


@check
def parameters_of_another_unit(rank: int) -> None:
    """They are divided as the others are; FSDP2 reduces them in each micro-batch."""
    for way in (FLAT, WINDOW):
        model = sharded(way)
        opt = gradaccum.wrap(
            sgd(model.first), steps=None, module=model, gradient_sync=way.sync
        )
        with refused(ArgumentValueError, "fully_shard"):
            opt.add_param_group({"params": nn.Linear(2, 2).parameters()})
        first = set(map(id, model.first.parameters()))
        rest = [each for each in model.parameters() if id(each) not in first]
        opt.add_param_group({"params": rest})
        require_first_window(model, opt, rank)


def distributed(tensor: Tensor, placement: Placement) -> Any:
    return distribute_tensor(tensor.clone(), mesh_of((2,)), [placement])


@check
def items_that_workers_share(rank: int) -> None:
    """A cut gathers the batch; the gradient is the large batch's: of ``mean()``, as
    torch's ``mse_loss`` of such tensors has twice its gradient.
    """
    weight, x, y = (torch.arange(n * 4.0).view(n, 4).sin() for n in (4, 8, 8))
    leaf = weight.clone().requires_grad_()
    wanted = (torch.tanh(x @ leaf) - y).square().mean()
    wanted.backward()

    def gradient(*batch: Any, **options: Any) -> Tensor:
        parameter = nn.Parameter(distributed(weight, Replicate()))

        def loss_fn(x: Any, y: Any) -> Any:
            return (torch.tanh(x @ parameter) - y).square().mean()

        loss: Any = gradaccum_torch.backward(loss_fn, *batch, steps=2, **options)
        torch.testing.assert_close(loss.full_tensor(), wanted.detach())
        found: Any = parameter.grad
        whole: Tensor = found.full_tensor()
        return whole

    shared = [distributed(each, Shard(0)) for each in (x, y)]
    whole = [distributed(each, Replicate()) for each in (x, y)]
    along_features = [distributed(x, Shard(1)), whole[1]]
    assert leaf.grad is not None
    for found in (gradient(*shared), gradient(*whole), gradient(*along_features)):
        torch.testing.assert_close(found, leaf.grad)
