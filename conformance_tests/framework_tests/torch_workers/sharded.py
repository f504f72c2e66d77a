"""A head whose classes are sharded over the workers of a data-parallel backbone, in one
optimizer, with torch's own cross-entropy of sharded logits.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import gradaccum

from .common import WORLD, numbers, require_same_everywhere
from .jobs import check

CLASSES, SIZE, ITEMS, STEPS = 7, 8, 6, 3
"""An odd number of classes: the shards differ."""
CLIP = 0.01


def parts() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(SIZE).eval()
    backbone = nn.Sequential(nn.Linear(4, SIZE), norm, nn.Tanh()).double()
    return backbone, torch.randn(CLASSES, SIZE, dtype=torch.float64)


def items(micro_batch: int) -> tuple[Tensor, Tensor]:
    """Of all workers, one after the other."""
    generator = torch.Generator().manual_seed(micro_batch)
    x = torch.randn(ITEMS, 4, generator=generator).double()
    return x, torch.randint(0, CLASSES, (ITEMS,), generator=generator)


def shared(**options: Any) -> tuple[Any, Any, Any]:
    backbone, head = parts()
    mesh = init_device_mesh("cpu", (WORLD,))
    weight = nn.Parameter(distribute_tensor(head, mesh, [Shard(0)]))
    parallel = DistributedDataParallel(backbone)
    groups = [{"params": list(backbone.parameters())}, {"params": [weight]}]
    opt = gradaccum.wrap(
        torch.optim.AdamW(groups, lr=0.1),
        reduction="sum_per_item",
        module=parallel,
        **options,
    )
    return parallel, weight, opt


def learn(
    rank: int, parallel: Any, weight: Any, opt: Any, x: Tensor, y: Tensor
) -> None:
    own = x.chunk(WORLD)[rank]
    features = DTensor.from_local(parallel(own), weight.device_mesh, [Shard(0)])
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
        opt.backward(loss.to_local(), weight=len(own))
    opt.step()
    opt.zero_grad()


@check
def norm_counts_each_shard_once(rank: int) -> None:
    """Beside one process with one large batch."""
    backbone, head = parts()
    whole = nn.Parameter(head)
    optimizer = torch.optim.AdamW([*backbone.parameters(), whole], lr=0.1)
    x, y = map(torch.cat, zip(*map(items, range(STEPS)), strict=True))
    cross_entropy(backbone(x) @ whole.T, y).backward()  # type: ignore[no-untyped-call]
    gradients = [each.grad for each in (*backbone.parameters(), whole)]
    norm = float(nn.utils.get_total_norm(gradients))
    for gradient in gradients:  # torch's clipping adds 1e-6 to the norm.
        gradient.mul_(CLIP / norm)
    optimizer.step()
    for scale in (None, gradaccum.DynamicLossScale(64.0)):
        parallel, shard, opt = shared(steps=STEPS, clip_norm=CLIP, loss_scale=scale)
        for index in range(STEPS):
            learn(rank, parallel, shard, opt, *items(index))
        assert math.isclose(opt.result.grad_norm, norm, rel_tol=1e-12)
        torch.testing.assert_close(shard.full_tensor(), whole, rtol=1e-12, atol=1e-12)
        for p, q in zip(parallel.parameters(), backbone.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-12)
        require_same_everywhere((numbers(parallel), opt.result))


@check
def overflow_in_one_shard_skips_on_all(rank: int) -> None:
    parallel, shard, opt = shared(steps=2)
    before = numbers(parallel), shard.full_tensor().tolist()
    for index in range(2):
        learn(rank, parallel, shard, opt, *items(index))
        if index == 0:
            factor = math.inf if rank == 1 else 0.0
            torch.autograd.backward(shard, torch.full_like(shard, factor))
    assert opt.result.overflow
    assert (numbers(parallel), shard.full_tensor().tolist()) == before
    require_same_everywhere(opt.result)
