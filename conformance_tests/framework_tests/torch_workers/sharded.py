"""A head whose classes are sharded over the workers of a data-parallel backbone, in one
optimizer, with torch's own cross-entropy of sharded logits.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import gradaccum
from conformance_tests.framework_tests.refusing import refused

from .common import WORLD, numbers, require_same_everywhere
from .jobs import check

CLASSES, SIZE, ITEMS, STEPS = 7, 8, 6, 3
"""An odd number of classes: the shards differ."""


def parts() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    backbone = nn.Sequential(
        nn.Linear(4, SIZE), nn.BatchNorm1d(SIZE).eval(), nn.Tanh()
    ).double()
    return backbone, torch.randn(CLASSES, SIZE, dtype=torch.float64)


def items(micro_batch: int) -> tuple[Tensor, Tensor]:
    """Of all workers, one after the other."""
    generator = torch.Generator().manual_seed(micro_batch)
    return torch.randn(ITEMS, 4, generator=generator).double(), torch.randint(
        0, CLASSES, (ITEMS,), generator=generator
    )


def shared(**options: Any) -> tuple[Any, nn.Parameter, Any]:
    from torch.distributed.tensor import Shard, distribute_tensor

    backbone, head = parts()
    mesh = init_device_mesh("cpu", (WORLD,))
    weight = nn.Parameter(distribute_tensor(head, mesh, [Shard(0)]))
    parallel = DistributedDataParallel(backbone)
    inner = torch.optim.AdamW(
        [{"params": list(backbone.parameters())}, {"params": [weight]}], lr=0.1
    )
    return (
        parallel,
        weight,
        gradaccum.wrap(inner, reduction="sum_per_item", module=parallel, **options),
    )


def learn(
    rank: int, parallel: Any, weight: Any, opt: Any, x: Tensor, y: Tensor
) -> None:
    from torch.distributed.tensor import DTensor, Partial, Shard
    from torch.distributed.tensor.parallel import loss_parallel

    own = slice(rank * ITEMS // WORLD, (rank + 1) * ITEMS // WORLD)
    features = DTensor.from_local(parallel(x[own]), weight.device_mesh, [Shard(0)])
    logits = features.full_tensor(grad_placements=[Partial()]) @ weight.to_local().T
    all_logits = DTensor.from_local(
        logits,
        weight.device_mesh,
        [Shard(1)],
        shape=(ITEMS, CLASSES),
        stride=(CLASSES, 1),
    )
    with loss_parallel():
        loss: Any = cross_entropy(all_logits, y, reduction="sum")
        opt.backward(loss.to_local(), weight=ITEMS // WORLD)
    opt.step()
    opt.zero_grad()


def reference(clip_norm: float) -> tuple[nn.Module, Tensor, float]:
    """One process with one large batch, clipped by torch."""
    backbone, head = parts()
    weight = nn.Parameter(head)
    optimizer = torch.optim.AdamW([*backbone.parameters(), weight], lr=0.1)
    x, y = (
        torch.cat(tensors) for tensors in zip(*map(items, range(STEPS)), strict=True)
    )
    cross_entropy(backbone(x) @ weight.T, y).backward()  # type: ignore[no-untyped-call]
    gradients = [
        each.grad for each in (*backbone.parameters(), weight) if each.grad is not None
    ]
    norm = float(nn.utils.get_total_norm(gradients))
    for gradient in gradients:  # torch's clipping adds 1e-6 to the norm.
        gradient.mul_(clip_norm / norm)
    optimizer.step()
    return backbone, weight, norm


@check
def norm_counts_each_shard_once(rank: int) -> None:
    backbone, weight, norm = reference(clip_norm=0.01)
    for scale in (None, gradaccum.DynamicLossScale(64.0)):
        parallel, shard, opt = shared(steps=STEPS, clip_norm=0.01, loss_scale=scale)
        for index in range(STEPS):
            learn(rank, parallel, shard, opt, *items(index))
        assert math.isclose(opt.result.grad_norm, norm, rel_tol=1e-12)
        torch.testing.assert_close(shard.full_tensor(), weight, rtol=1e-12, atol=1e-12)  # type: ignore[attr-defined]
        for p, q in zip(parallel.parameters(), backbone.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-12)
        require_same_everywhere((numbers(parallel), opt.result))


@check
def overflow_in_one_shard_skips_on_all(rank: int) -> None:
    parallel, shard, opt = shared(steps=2)
    before = numbers(parallel), shard.full_tensor().tolist()  # type: ignore[attr-defined]
    for index in range(2):
        learn(rank, parallel, shard, opt, *items(index))
        if rank == 1 and index == 0:
            torch.autograd.backward(shard, torch.full_like(shard, math.inf))
        elif index == 0:
            torch.autograd.backward(shard, torch.zeros_like(shard))
    assert opt.result.overflow
    assert (numbers(parallel), shard.full_tensor().tolist()) == before  # type: ignore[attr-defined]
    require_same_everywhere(opt.result)


@check
def shards_over_other_workers_are_refused(rank: int) -> None:
    """The head would need a reduction of its own, over the workers that have the same
    shard.
    """
    from torch.distributed.tensor import Shard, distribute_tensor

    backbone, head = parts()
    mesh = init_device_mesh("cpu", (WORLD, 1), mesh_dim_names=("data", "classes"))
    weight = nn.Parameter(distribute_tensor(head, mesh["classes"], [Shard(0)]))
    inner = torch.optim.SGD([*backbone.parameters(), weight], lr=0.1)
    with refused(
        gradaccum.ArgumentValueError, "module", "[0, 1]", f"[{dist.get_rank()}]"
    ):
        gradaccum.wrap(inner, steps=2, module=DistributedDataParallel(backbone))
