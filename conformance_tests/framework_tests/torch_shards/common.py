"""The sharded model, its data, and the same model whole in one process that has all
micro-batches.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import gradaccum

from ..torch_workers.common import (
    Batch,
    Branches,
    alone,
    build,
    learn,
    micro_batches,
    require_equal,
    sgd,
    whole,
)
from ..torch_workers.jobs import Check

CHECKS = {}
"""Each runs on all workers at once, in the order in which it was added."""
DTYPE = torch.float64


def check(function: Check) -> Check:
    CHECKS[function.__name__] = function
    return function


class Way(NamedTuple):
    """When FSDP2 reduces, on which mesh."""

    sync: str
    shape: tuple[int, ...]


WAYS = [
    Way("micro_batch", (2,)),
    Way("window", (2,)),
    Way("micro_batch", (2, 1)),
    Way("window", (2, 1)),
    Way("window", (1, 2)),
]


WAITING = [way for way in WAYS if way.sync != "micro_batch"]
FLAT, WINDOW = WAYS[:2]


def mesh_of(shape: tuple[int, ...]) -> DeviceMesh:
    return init_device_mesh(
        "cpu", shape, mesh_dim_names=("copy", "shard")[-len(shape) :]
    )


def sharded(way: Way, dtype: torch.dtype = DTYPE, **options: Any) -> Branches:
    """Two units of FSDP2: the first layer, and the rest."""
    model = build(dtype)
    mesh = mesh_of(way.shape)
    fully_shard(model.first, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return model


def wrap(model: nn.Module, way: Way, **options: Any) -> Any:
    return gradaccum.wrap(
        sgd(model), **{"steps": 3, **options}, module=model, gradient_sync=way.sync
    )


def each_way(
    ways: Sequence[Way] = WAYS, **options: Any
) -> Iterator[tuple[Way, Branches, Any]]:
    for way in ways:
        model = sharded(way)
        yield way, model, wrap(model, way, **options)


def batches(rank: int, count: int = 6, dtype: torch.dtype = DTYPE) -> list[Batch]:
    """All workers take the rare branch in the same micro-batch, as FSDP2 wants."""
    return [
        (x, index == 1)
        for index, (x, _) in enumerate(micro_batches(rank, dtype, count))
    ]


def train(model: nn.Module, opt: Any, rank: int, last: int = 6, first: int = 0) -> None:
    for batch in batches(rank, last)[first:]:
        learn(model, opt, batch)


def windows_of(*sizes: int, dtype: torch.dtype = DTYPE) -> list[list[Batch]]:
    """The micro-batches of all workers, window by window."""
    everyone = [iter(batches(rank, sum(sizes), dtype)) for rank in range(2)]
    return [
        [next(worker) for worker in everyone for _ in range(size)] for size in sizes
    ]


def require_first_window(model: nn.Module, opt: Any, rank: int) -> None:
    """The next window is as if nothing had been before it."""
    train(model, opt, rank, 3)
    if not opt.result.applied:
        opt.flush()
    require_equal(model, alone(windows_of(3))[0])


def numbers(model: nn.Module) -> list[Tensor]:
    return [whole(parameter) for parameter in model.parameters()]


def require_equal_results(opt: Any, other: Any) -> None:
    """But for a rounding of the norm and of the loss."""
    mine = opt.result
    wanted = other.result
    for name in ("grad_norm", "loss"):
        pair = getattr(mine, name), getattr(wanted, name)
        assert math.isclose(*pair, rel_tol=1e-12), (mine, wanted)
    rest = {"grad_norm": 0, "loss": 0}
    assert mine._replace(**rest) == wanted._replace(**rest)
