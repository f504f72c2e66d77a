"""The model, its data, one process that has all micro-batches, and one of two workers
that share them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import gradaccum

WORLD = 2
COUNTS = (6, 3)
"""Micro-batches on each worker: in windows of four a whole one, and a tail that only
one worker has.
"""


class Branches(nn.Module):
    """A model with a branch that few micro-batches take, and one that none takes; a
    buffer, which `DistributedDataParallel` sends; and layers of five rows, which
    workers share unevenly.
    """

    calls: Tensor

    def __init__(self, recomputed: bool = False) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()), persistent=False)
        self.first, self.usual = nn.Linear(4, 6), nn.Linear(6, 5)
        self.rare, self.never = nn.Linear(6, 5), nn.Linear(6, 5)
        self.recomputed = recomputed

    def forward(self, x: Tensor, rare: bool = False) -> Tensor:
        self.calls += 1
        head = self.rare if rare else self.usual
        if self.recomputed:
            return checkpoint(self.both, x, head, use_reentrant=False)
        return self.both(x, head)

    def both(self, x: Tensor, head: nn.Module) -> Tensor:
        return head(torch.tanh(self.first(x)))


Batch = tuple[Tensor, bool]
"""The items, and whether they take the rare branch."""


def micro_batches(
    rank: int, dtype: torch.dtype = torch.float64, count: int | None = None
) -> list[Batch]:
    """Of unequal sizes; one of the second worker takes the rare branch."""
    generator = torch.Generator().manual_seed(rank)
    sizes = [3 + rank + index for index in range(count or COUNTS[rank])]
    items = [torch.randn(size, 4, generator=generator) for size in sizes]
    return [(x.to(dtype), rank == index == 1) for index, x in enumerate(items)]


def build(dtype: torch.dtype = torch.float64, **options: Any) -> Branches:
    torch.manual_seed(0)
    return Branches(**options).to(dtype)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """With weight decay and momentum, to which a gradient of zeros is not the same as
    none.
    """
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)


def ddp(model: nn.Module) -> DistributedDataParallel:
    return DistributedDataParallel(model, find_unused_parameters=True)


def make_shared(
    model: nn.Module | None = None, **options: Any
) -> tuple[Any, DistributedDataParallel, Any]:
    """A model in windows of four, its parallel module, and its optimizer."""
    model = build() if model is None else model
    parallel = ddp(model)
    options = {"steps": 4, "module": parallel, **options}
    return model, parallel, gradaccum.wrap(sgd(model), **options)


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    x, rare = batch
    outputs = model(x, rare).to(torch.promote_types(x.dtype, torch.float32))
    return (outputs - 1).square().mean()


def learn(model: nn.Module, opt: Any, batch: Batch) -> None:
    opt.backward(loss_of(model, batch), len(batch[0]))
    opt.step()
    opt.zero_grad()


def alone(
    windows: list[list[Batch]], dtype: torch.dtype = torch.float64, **options: Any
) -> tuple[nn.Module, Any]:
    """One process with all micro-batches, each list a window."""
    model = build(dtype)
    opt = gradaccum.wrap(sgd(model), steps=None, process_group="alone", **options)
    for window in windows:
        learn_all(model, opt, window)
    return model, opt


def windows_of(workers: list[list[Batch]], steps: int) -> list[list[Batch]]:
    """The windows of all workers, each of which has some of the micro-batches."""
    return [
        [batch for worker in workers for batch in worker[first : first + steps]]
        for first in range(0, max(map(len, workers)), steps)
    ]


def all_windows(steps: int = 4) -> list[list[Batch]]:
    return windows_of([micro_batches(rank) for rank in range(WORLD)], steps)


def learn_all(model: nn.Module, opt: Any, batches: list[Batch]) -> None:
    """And flush."""
    for batch in batches:
        learn(model, opt, batch)
    opt.flush()


def whole(tensor: Any) -> Tensor:
    """The parameter of all workers, if it is sharded."""
    detached = tensor.detach()
    return detached.full_tensor() if hasattr(detached, "full_tensor") else detached


def require_equal(model: nn.Module, reference: nn.Module, off: float = 1e-13) -> None:
    pair = ([whole(p) for p in each.parameters()] for each in (model, reference))
    torch.testing.assert_close(*pair, rtol=off, atol=off)


def require_same_everywhere(value: Any) -> None:
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    # NaN is no number, but has a name.
    assert len(set(map(repr, everyone))) == 1, everyone


def numbers(model: nn.Module) -> list[list[float]]:
    return [p.detach().double().flatten().tolist() for p in model.parameters()]
