"""Reduces the gradient sums of a window in buckets. If possible, the reduction begins
during the window's last backward pass.

All workers reduce the same buckets in the same order. The buckets contain the trainable
parameters from the last to the first, because autograd computes their gradients in
about this order. A worker without a sum contributes zeros. Each worker can therefore
begin the reduction during the backward pass that ends its window, as
`DistributedDataParallel` does for a single batch (Li et al., "PyTorch Distributed:
Experiences on Accelerating Data Parallel Training", VLDB 2020, section 3.2.3). At the
latest, the reduction begins when the worker's window ends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from gradaccum_torch.arithmetic import sum_dtype
from gradaccum_torch.checks import unfinished_error
from gradaccum_torch.gradient_sum import GradientSum
from gradaccum_torch.torch_private import names

Bucket = list[Tensor]
"""Parameters whose gradient sums are reduced together."""
BUCKET_BYTES = 25 * 2**20
"""The maximum total size of the gradient sums that share a bucket, and are therefore
all-reduced together. It is equal to the default bucket size of
`DistributedDataParallel`.
"""
LARGE_BYTES = 4 * 2**20
"""A tensor of at least this size is all-reduced on its own, because copying the tensor
into a bucket and back would take longer (measured with gloo and two processes).
"""


class BucketReduction:
    """The reduction of one window's gradient sums, bucket by bucket."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        parameters: Sequence[Tensor],
        gradient_sum: GradientSum,
        accumulate_dtype: torch.dtype | None,
    ) -> None:
        self.group = group
        self.gradient_sum = gradient_sum
        self.dtype_of = partial(sum_dtype, accumulate_dtype=accumulate_dtype)
        self.buckets = buckets(parameters[::-1], self.dtype_of)
        self.contributions: set[int] = set()
        """The ids of the parameters for which this worker had a gradient sum."""
        self.bucket_numbers: dict[int, int] = {}
        for number, bucket in enumerate(self.buckets):
            self.bucket_numbers.update(dict.fromkeys(map(id, bucket), number))
        self.missing = [set(map(id, bucket)) for bucket in self.buckets]
        """For each bucket, the ids of the parameters whose gradient sums are not
        complete yet. A sum is complete when the window's final gradient has been added
        to it.
        """
        self.launch_count = 0
        self.works: list[dist.Work] = []
        self.copies: list[tuple[Tensor, Tensor]] = []
        """A pair of tensors for each sum that is not contiguous: the sum, and the
        tensor whose reduced values must be copied into the sum.
        """

    def gradient_added(self, parameter: Tensor) -> None:
        """Record that the gradient sum of `parameter` is complete. Begin to reduce the
        next buckets in order, and stop at the first bucket that is not complete.
        """
        number = self.bucket_numbers[id(parameter)]
        if number < self.launch_count:
            raise unfinished_error("backward()")
        self.missing[number].discard(id(parameter))
        while self.launch_count < len(self.buckets):
            if self.missing[self.launch_count]:
                break
            self.launch()

    @torch.no_grad()
    def launch(self) -> None:
        """Begin to reduce the next bucket."""
        bucket = self.buckets[self.launch_count]
        self.launch_count += 1
        totals = [self.total(parameter) for parameter in bucket]
        if len(totals) == 1 and totals[0].is_contiguous():
            packed_totals = totals[0]
            parts: Sequence[Tensor] = totals
        else:
            packed_totals = names.flattened(totals)
            parts = names.unflattened(packed_totals, totals)
        work = dist.all_reduce(packed_totals, group=self.group, async_op=True)
        self.works.append(work)
        for parameter, total, part in zip(bucket, totals, parts, strict=True):
            if total.is_contiguous():
                self.gradient_sum.put(parameter, part)
            else:
                self.gradient_sum.put(parameter, total)
                self.copies.append((total, part))

    def total(self, parameter: Tensor) -> Tensor:
        total = self.gradient_sum.take(parameter)
        if total is None:
            return torch.zeros_like(parameter, dtype=self.dtype_of(parameter))
        self.contributions.add(id(parameter))
        return total.detach()

    @torch.no_grad()
    def wait(self) -> None:
        for work in self.works:
            work.wait()
        for total, part in self.copies:
            total.copy_(part)


names.untraced(BucketReduction.gradient_added)


def buckets(
    tensors: Sequence[Tensor],
    dtype_of: Callable[[Tensor], torch.dtype],
) -> list[Bucket]:
    """Return lists of tensors that are reduced together: each large tensor by itself,
    and small tensors together if they have the same dtype and device. The lists are
    ordered by their last tensors, because a bucket is complete when its last tensor is
    complete.
    """
    complete_buckets: list[Bucket] = []
    bucket: Bucket = []
    size = 0
    for tensor in tensors:
        # Ignore the tensors' memory layouts, because they may differ between workers.
        # The sizes, dtypes and devices, which are compared here, do not differ.
        nbytes = tensor.numel() * dtype_of(tensor).itemsize
        if nbytes >= LARGE_BYTES:
            complete_buckets.append([tensor])
            continue
        is_alike = not bucket or (
            tensor.device == bucket[0].device
            and dtype_of(tensor) == dtype_of(bucket[0])
        )
        if not is_alike or size + nbytes > BUCKET_BYTES:
            complete_buckets.append(bucket)
            bucket = []
            size = 0
        bucket.append(tensor)
        size += nbytes
    if bucket:
        complete_buckets.append(bucket)
    positions = {id(tensor): position for position, tensor in enumerate(tensors)}
    return sorted(complete_buckets, key=lambda each: positions[id(each[-1])])
