"""The sharded model, its data, and the same model whole in one process that has all
micro-batches.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

import gradaccum
from conformance_tests.framework_tests.torch_workers.jobs import Check

CHECKS: dict[str, Check] = {}
"""Each runs on all workers at once, in the order in which it was added."""
DTYPE = torch.float64
_DRAWING = threading.Lock()
"""Workers may be threads, which share a random generator."""


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
    Way("all_reduce_per_window", (2, 1)),
]
if not hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
    WAYS.pop()  # Refused by name: an older torch has no such method.


class Branches(nn.Module):
    """A model with a branch that few micro-batches take; the last layer has five rows,
    which workers share unevenly.
    """

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.first, self.usual, self.rare, self.never = (
            nn.Linear(4, 6),
            nn.Linear(6, 5),
            nn.Linear(6, 5),
            nn.Linear(6, 5),
        )

    def forward(self, x: Tensor, rare: bool = False) -> Tensor:
        self.calls += 1
        return (self.rare if rare else self.usual)(torch.tanh(self.first(x)))


Batch = tuple[Tensor, bool]


def mesh_of(shape: tuple[int, ...]) -> DeviceMesh:
    return init_device_mesh(
        "cpu", shape, mesh_dim_names=("copy", "shard")[-len(shape) :]
    )


def build(dtype: torch.dtype = DTYPE) -> Branches:
    with _DRAWING:
        torch.manual_seed(0)
        return Branches().to(dtype)


def sharded(way: Way, dtype: torch.dtype = DTYPE, **options: Any) -> Branches:
    """Two units of FSDP2: the first layer, and the rest."""
    model, mesh = build(dtype), mesh_of(way.shape)
    fully_shard(model.first, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return model


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """With weight decay and momentum, to which a gradient of zeros is not the same as
    none.
    """
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)


def wrap(model: nn.Module, way: Way, **options: Any) -> Any:
    return gradaccum.wrap(
        sgd(model), **{"steps": 3, **options}, module=model, gradient_sync=way.sync
    )


def rows(rank: int, index: int, dtype: torch.dtype = DTYPE) -> Tensor:
    """Micro-batch `index` of a worker; each has another size."""
    generator = torch.Generator().manual_seed(100 * rank + index)
    return torch.randn(
        2 + (3 * rank + index) % 4, 4, generator=generator, dtype=torch.float64
    ).to(dtype)


def batches(rank: int, count: int = 6, dtype: torch.dtype = DTYPE) -> list[Batch]:
    """All workers take the rare branch in the same micro-batch, as FSDP2 wants."""
    return [(rows(rank, index, dtype), index == 1) for index in range(count)]


def learn(model: nn.Module, opt: Any, batch: Batch, summed: bool = False) -> None:
    x, rare = batch
    losses = (
        model(x, rare).to(torch.promote_types(x.dtype, torch.float32)).square().mean(1)
    )
    opt.backward(losses.sum() if summed else losses.mean(), len(x))
    opt.step()
    opt.zero_grad()


def train(
    model: nn.Module, opt: Any, rank: int, count: int = 6, **options: Any
) -> None:
    for batch in batches(rank, count):
        learn(model, opt, batch, **options)


def alone(
    windows: list[list[Batch]],
    workers: int = 2,
    summed: bool = False,
    dtype: torch.dtype = DTYPE,
    **options: Any,
) -> tuple[Branches, Any]:
    """One process with all micro-batches, each list a window."""
    model = build(dtype)
    opt = gradaccum.wrap(sgd(model), steps=None, **options)
    for window in windows:
        for batch in window:
            learn(model, opt, batch, summed)
        opt.flush()
    return model, opt


def windows_of(
    sizes: tuple[int, ...] = (3, 3), workers: int = 2, dtype: torch.dtype = DTYPE
) -> list[list[Batch]]:
    """The micro-batches of all workers, window by window."""
    everyone = [batches(rank, sum(sizes), dtype) for rank in range(workers)]
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    return [
        [b for worker in everyone for b in worker[first : first + size]]
        for first, size in zip(starts, sizes, strict=True)
    ]


def whole(tensor: Any) -> Tensor:
    tensor = tensor.detach()
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor  # type: ignore[no-any-return]


def numbers(model: nn.Module) -> list[Tensor]:
    return [whole(parameter) for parameter in model.parameters()]


def require_equal(model: nn.Module, reference: nn.Module, off: float = 1e-13) -> None:
    names = dict(reference.named_parameters())
    for p, q, name in zip(numbers(model), numbers(reference), names, strict=True):
        torch.testing.assert_close(
            p, q, rtol=off, atol=off, msg=lambda text, name=name: f"{name}: {text}"
        )


def require_equal_results(opt: Any, other: Any) -> None:
    """But for a rounding of the norm and of the loss."""
    mine, wanted = opt.result, other.result
    for name in ("grad_norm", "loss"):
        pair = getattr(mine, name), getattr(wanted, name)
        assert math.isclose(*pair, rel_tol=1e-12), (mine, wanted)
    rest = {"grad_norm": 0, "loss": 0}
    assert mine._replace(**rest) == wanted._replace(**rest)


NUMBERS = 8 * (4 + 32 + 1)
"""Bytes: weight, flag and counts, the bits of the learning rates, and the loss."""


@contextmanager
def counted() -> Iterator[list[tuple[str, int]]]:
    """The collectives inside: the name of each and the bytes that it was handed; 0 for
    the numbers that a window's end adds up.
    """
    called: list[tuple[str, int]] = []
    older = {
        "reduce_scatter_single": "reduce_scatter_tensor",
        "all_gather_single": "all_gather_into_tensor",
    }
    names = {
        name: name if hasattr(dist, name) else older[name]
        for name in ("all_reduce", *older)
    }
    originals = {name: getattr(dist, names[name]) for name in names}

    def counting(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            tensors = [
                each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)
            ]
            size = max(tensor.nbytes for tensor in tensors)
            called.append((name, 0 if size == NUMBERS else size))
            return originals[name](*args, **kwargs)

        return call

    for name in names:
        setattr(dist, names[name], counting(name))
    try:
        yield called
    finally:
        for name, original in originals.items():
            setattr(dist, names[name], original)
