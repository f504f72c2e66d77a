"""Layered windows of two workers, whose layers are copies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import gradaccum
from gradaccum_torch import backward, layered_backward

from ..refusing import refused
from .common import check, mesh_of, require_equal

ITEMS, STEPS, LAYERS = (5, 7), 3, 4
"""The items of each worker; the micro-batches of each; the layers of the model."""
OPTIONS = [{"clip_norm": 0.1}, {"on_overflow": "ignore", "reduction": "sum"}]


def build() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(5, 5), nn.Tanh()) for _ in range(LAYERS)]
    return nn.Sequential(*layers, nn.ReLU()).double()


def shard(model: nn.Sequential) -> nn.Sequential:
    for module in (*model[:LAYERS], model):
        fully_shard(module, mesh=mesh_of((2,)))
    return model


def mean(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().mean()


def total(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().sum()


def loss_for(options: dict[str, Any]) -> Callable[[Tensor, Tensor], Tensor]:
    return total if options.get("reduction") == "sum" else mean


def data() -> tuple[Tensor, Tensor]:
    x, y = torch.arange(2.0 * 5 * sum(ITEMS)).double().sin().reshape(2, -1, 5)
    return x, y


def own(rank: int) -> tuple[Tensor, Tensor]:
    x, y = (each.split(ITEMS)[rank] for each in data())
    return x, y


def wrap(model: nn.Module, **options: Any) -> Any:
    inner = torch.optim.AdamW(model.parameters(), lr=0.1)
    return gradaccum.wrap(inner, None, **{"on_overflow": "ignore", **options})


def require_same_as_alone(model: nn.Module, options: dict[str, Any]) -> None:
    """Raise unless the model is that of one process with three windows of all items."""
    alone = build()
    loss_fn = loss_for(options)
    opt = wrap(alone, **options)
    for _ in range(3):
        backward(lambda x, y: loss_fn(alone(x), y), *data(), steps=2, optimizer=opt)
    require_equal(model, alone, off=1e-10)


@check
def layers_of_copies(rank: int) -> None:
    """Unequal items; a layer is reduced once, after the numbers of the window."""
    for options in OPTIONS:
        for grouped in (False, True):
            model = build()
            workers = (
                {"process_group": dist.group.WORLD}
                if grouped
                else {"module": DistributedDataParallel(model)}
            )
            opt = wrap(model, **workers, **options)
            loss_fn = loss_for(options)
            for _ in range(3):
                with mock.patch.object(
                    dist, "all_reduce", wraps=dist.all_reduce
                ) as called:
                    layered_backward(
                        model, loss_fn, *own(rank), steps=STEPS, optimizer=opt
                    )
            collectives = 2 if "clip_norm" in options else 2 * LAYERS
            assert called.call_count == collectives
            require_same_as_alone(model, options)


@check
def layers_of_a_worker_without_weight(rank: int) -> None:
    """A worker whose items all have weight 0 reduces as the other does, and adds
    nothing, not even NaN.
    """
    (x, _), (y, _) = (each.split(ITEMS) for each in data())
    alone = build()
    other = wrap(alone)
    backward(lambda x, y: mean(alone(x), y), x, y, steps=2, optimizer=other)
    x, y = own(rank)
    if rank == 1:
        x = x * float("nan")
    model = build()
    layered_backward(
        model,
        mean,
        x,
        y,
        steps=STEPS,
        weight=[1.0 - rank] * len(x),
        optimizer=wrap(model, module=DistributedDataParallel(model)),
    )
    require_equal(model, alone, off=1e-10)


@check
def layers_that_are_refused(rank: int) -> None:
    """Shards, whose sums FSDP2 would not reduce layer by layer."""
    model = shard(build())
    with refused(gradaccum.ArgumentTypeError, "layers", "FSDP2", "backward"):
        layered_backward(
            model, mean, *own(rank), steps=STEPS, optimizer=wrap(model, module=model)
        )
