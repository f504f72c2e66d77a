"""One sum over all workers for many tensors, without a second copy of the model.

Large tensors are reduced one by one, in place. Small ones travel together in buckets, which have the size of those of
`torch.nn.parallel.DistributedDataParallel` (``bucket_cap_mb``); while one is on its way the next is packed. The first bucket takes numbers
with it, because a collective of their own takes longer than all else that the end of a small model's window does.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from gradaccum_torch.torch_private import foreach_copy_, is_sharded
from gradaccum_torch.workers.workers import Sums

BUCKET_BYTES = 25 * 2**20
LARGE_BYTES = 4 * 2**20
"""From here on a collective of its own costs less than packing and unpacking (measured with gloo, two processes)."""
IN_FLIGHT = 2
"""Buckets packed at a time: they take at most this much memory beside the tensors."""
_EXACT = (torch.float32, torch.float64)


def riders(sums: Sums, device: torch.device) -> list[int]:
    """The positions of the sums that ride in the first bucket: small ones of one dtype that holds counts exactly."""
    whole = [(index, total) for index, total in enumerate(sums) if total is not None and not is_sharded(total)]
    small = [(index, total) for index, total in whole if total.nbytes < LARGE_BYTES]
    exact = [(index, total) for index, total in small if total.dtype in _EXACT and total.device == device]
    alike = [(index, total) for index, total in exact if total.dtype == exact[0][1].dtype]
    ends = itertools.accumulate(total.nbytes for _, total in alike)
    return [index for (index, _), end in zip(alike, ends, strict=True) if end <= BUCKET_BYTES]


class FirstBucket:
    """Numbers and tensors on their way together. The tensors keep their values until `unpack`."""

    def __init__(self, numbers: Sequence[float], tensors: list[Tensor], device: torch.device, group: dist.ProcessGroup) -> None:
        head = torch.tensor(numbers, dtype=tensors[0].dtype if tensors else torch.float32, device=device)
        self._tensors, self._count = tensors, len(numbers)
        self._packed = torch.cat([head, *(tensor.reshape(-1) for tensor in tensors)]) if tensors else head
        dist.all_reduce(self._packed, group=group)

    def numbers(self) -> list[float]:
        """The numbers of all workers; waits for the device."""
        added: list[float] = self._packed[: self._count].tolist()
        return added

    def unpack(self) -> None:
        """Replace each tensor by its sum over the workers."""
        _unpack(self._packed[self._count :], self._tensors)


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
            _unpack(self._packed, self._tensors)


def _unpack(packed: Tensor, tensors: list[Tensor]) -> None:
    if tensors:
        parts = torch.split(packed, [tensor.numel() for tensor in tensors])
        foreach_copy_(tensors, [part.view_as(tensor) for tensor, part in zip(tensors, parts, strict=True)])
