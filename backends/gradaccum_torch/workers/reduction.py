"""One sum over all workers for many tensors, without a second copy of the model.

Large tensors are reduced one by one, in place. Small ones travel together in buckets, which have the size of those of
`torch.nn.parallel.DistributedDataParallel` (``bucket_cap_mb``); while one is on its way the next is packed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

BUCKET_BYTES = 25 * 2**20
LARGE_BYTES = 2**20
"""From here on a collective of its own costs less than packing and unpacking."""
IN_FLIGHT = 2
"""Buckets packed at a time: they take at most this much memory beside the tensors."""


@torch.no_grad()
def all_reduce(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Replace each tensor by its sum over the workers of `group`, in place; every worker has the same shapes and dtypes in one order."""
    # By the size alone, which is the same on every worker, as a layout may not be.
    large = [_Reduction([tensor], group) for tensor in tensors if tensor.nbytes >= LARGE_BYTES]
    flying: deque[_Reduction] = deque()
    for bucket in buckets([tensor for tensor in tensors if tensor.nbytes < LARGE_BYTES]):
        if len(flying) == IN_FLIGHT:
            flying.popleft().finish()
        flying.append(_Reduction(bucket, group))
    for reduction in (*flying, *large):
        reduction.finish()


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


class _Reduction:
    """Tensors on their way: one in place if it is contiguous, else packed into one."""

    def __init__(self, tensors: list[Tensor], group: dist.ProcessGroup) -> None:
        self._tensors = tensors
        alone = len(tensors) == 1 and tensors[0].is_contiguous()
        self._packed = None if alone else torch.cat([tensor.reshape(-1) for tensor in tensors])
        self._work = dist.all_reduce(tensors[0] if self._packed is None else self._packed, group=group, async_op=True)

    def finish(self) -> None:
        assert self._work is not None
        self._work.wait()
        if self._packed is not None:
            parts = torch.split(self._packed, [tensor.numel() for tensor in self._tensors])
            for tensor, part in zip(self._tensors, parts, strict=True):
                tensor.copy_(part.view_as(tensor))
