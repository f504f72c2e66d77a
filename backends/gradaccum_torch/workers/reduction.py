"""One sum over all workers for many tensors: in buckets, so that no second copy of the model is made.

The buckets have the size of `torch.nn.parallel.DistributedDataParallel`'s (``bucket_cap_mb``). While one is on its way the next is packed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

BUCKET_BYTES = 25 * 2**20
IN_FLIGHT = 2
"""Buckets packed at a time: what is reduced takes at most this much memory beside the tensors."""


@torch.no_grad()
def all_reduce(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Replace each tensor by its sum over the workers of `group`, in place; every worker has the same shapes and dtypes in one order."""
    flying: deque[tuple[dist.Work, Tensor, list[Tensor]]] = deque()
    for bucket in buckets(tensors):
        if len(flying) == IN_FLIGHT:
            _land(*flying.popleft())
        packed = torch.cat([tensor.reshape(-1) for tensor in bucket])
        work = dist.all_reduce(packed, group=group, async_op=True)
        assert work is not None
        flying.append((work, packed, bucket))
    while flying:
        _land(*flying.popleft())


def buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Neighbours of one dtype and device, `BUCKET_BYTES` at most unless a single tensor is larger."""
    bucket: list[Tensor] = []
    size = 0
    for tensor in tensors:
        fits = bucket and size + tensor.nbytes <= BUCKET_BYTES and (tensor.dtype, tensor.device) == (bucket[0].dtype, bucket[0].device)
        if bucket and not fits:
            yield bucket
            bucket, size = [], 0
        bucket.append(tensor)
        size += tensor.nbytes
    if bucket:
        yield bucket


def _land(work: dist.Work, packed: Tensor, bucket: list[Tensor]) -> None:
    work.wait()
    parts = torch.split(packed, [tensor.numel() for tensor in bucket])
    for tensor, part in zip(bucket, parts, strict=True):
        tensor.copy_(part.view_as(tensor))
