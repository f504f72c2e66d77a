"""The reduction of a window's sums under its last backward pass.

Where a micro-batch is known to end the window, a bucket of sums is reduced as soon as
autograd has delivered the last gradient for it, while the pass goes on. This hides the
network behind the computation, as `DistributedDataParallel` does for a single batch
(Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training",
VLDB 2020, section 3.2.3).

All workers have to issue the same collectives in the same order, also one that has
fewer micro-batches. So a reduction begins with a vote, in which a worker says whether
it has an open window and can reduce in buckets. The buckets hold the parameters that
had a gradient on any worker in the last window, which all workers know. If somebody
cannot, all of them reduce at the window's end.
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from gradaccum_torch.arithmetic import sum_dtype
from gradaccum_torch.gradient_sum import Gradients, GradientSum
from gradaccum_torch.torch_private import names

Bucket = list[Tensor]
"""Parameters whose sums are reduced together."""
SumDtype = Callable[[Tensor], torch.dtype]


class Ballot(NamedTuple):
    """A worker's vote at the beginning of a reduction."""

    is_open: bool
    """It has an open window."""
    is_flushing: bool
    """It has run out of micro-batches."""
    is_unable: bool
    """It cannot reduce in the buckets that all workers know."""
    bits: Sequence[int]
    """A fingerprint of its optimizer and learning rates, of zeros and ones."""


GetBallot = Callable[[], Ballot]


class BucketReduction:
    """The reduction of one window, from the vote to the last bucket."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        buckets: Sequence[Bucket],
        accumulate_dtype: torch.dtype | None,
        ballot: Ballot,
    ) -> None:
        self.group = group
        self.buckets = buckets
        self.accumulate_dtype = accumulate_dtype
        self.contributions: set[int] = set()
        """The ids of the parameters of which this worker had a sum."""
        self.reduced: Gradients = {}
        """The sums over all workers."""
        self._bucket_numbers = {
            id(parameter): number
            for number, bucket in enumerate(buckets)
            for parameter in bucket
        }
        self._arrived: set[int] = set()
        self._missing = [len(bucket) for bucket in buckets]
        self._launched = 0
        self._in_flight: list[tuple[dist.Work, Tensor, Bucket, list[Tensor]]] = []
        self._handles: list[RemovableHandle] = []
        numbers = [ballot.is_open, ballot.is_flushing, ballot.is_unable, *ballot.bits]
        device = buckets[0][0].device
        self._votes = torch.tensor(numbers, dtype=torch.int32, device=device)
        self._vote = dist.all_reduce(self._votes, group=group, async_op=True)
        self._counts: list[int] | None = None

    # The vote.

    def _added_votes(self) -> list[int]:
        if self._counts is None:
            self._vote.wait()
            self._counts = self._votes.tolist()
        return self._counts

    @property
    def is_open(self) -> bool:
        """True if some worker has an open window; waits for the vote."""
        return self._added_votes()[0] > 0

    @property
    def flushing_workers(self) -> int:
        return self._added_votes()[1]

    @property
    def is_agreed(self) -> bool:
        """True if all workers reduce in buckets; waits for the vote."""
        opened, _, unable, *bits = self._added_votes()
        size = dist.get_world_size(self.group)
        return opened > 0 and not unable and {0, size}.issuperset(bits)

    # Under the backward pass.

    def gradient_added(self, parameter: Tensor, gradient_sum: GradientSum) -> None:
        """Note that the sum of `parameter` has its last gradient of this pass; reduce
        the buckets that are complete.
        """
        number = self._bucket_numbers.get(id(parameter))
        if number is None or id(parameter) in self._arrived:
            return
        self._arrived.add(id(parameter))
        self._missing[number] -= 1
        while self._launched < len(self.buckets) and not self._missing[self._launched]:
            if not self.is_agreed:
                return
            bucket = self.buckets[self._launched]
            self._launch({each: gradient_sum.take(each) for each in bucket})

    def pass_ended(self, gradient_sum: GradientSum) -> None:
        """Reduce the rest, and wait for all of it, as `DistributedDataParallel` does at
        the end of its backward pass.
        """
        if not self.is_agreed:
            return
        for bucket in self.buckets[self._launched :]:
            self._launch({each: gradient_sum.take(each) for each in bucket})
        self._wait()
        self._handles += gradient_sum.put_back(self.reduced)

    # At the end of the window.

    def finish(self, gradients: Mapping[Tensor, Tensor]) -> Gradients:
        """Reduce the buckets that are left, of the sums in `gradients`, and wait; return
        the sums that were in none of them.
        """
        rest = {
            parameter: total
            for parameter, total in gradients.items()
            if total is not self.reduced.get(parameter)
        }
        for bucket in self.buckets[self._launched :]:
            dense_sums: dict[Tensor, Tensor | None] = {}
            for parameter in bucket:
                total = rest.get(parameter)
                if total is None or total.is_sparse:
                    dense_sums[parameter] = None
                else:
                    dense_sums[parameter] = rest.pop(parameter)
            self._launch(dense_sums)
        self._wait()
        self.end()
        return rest

    def end(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    # One bucket.

    @torch.no_grad()
    def _launch(self, sums: Mapping[Tensor, Tensor | None]) -> None:
        """Begin to reduce the next bucket; a parameter without a sum adds zeros."""
        self._launched += 1
        totals: list[Tensor] = []
        for parameter, total in sums.items():
            if total is None:
                dtype = sum_dtype(parameter, self.accumulate_dtype)
                totals.append(torch.zeros_like(parameter, dtype=dtype))
            else:
                self.contributions.add(id(parameter))
                totals.append(total.detach())
        if len(totals) == 1 and totals[0].is_contiguous():
            packed = totals[0]
        else:
            packed = names.flattened(totals)
        work = dist.all_reduce(packed, group=self.group, async_op=True)
        self._in_flight.append((work, packed, list(sums), totals))

    @torch.no_grad()
    def _wait(self) -> None:
        for work, packed, parameters, totals in self._in_flight:
            work.wait()
            if packed is totals[0]:
                self.reduced[parameters[0]] = packed
                continue
            parts = names.unflattened(packed, totals)
            for parameter, total, part in zip(parameters, totals, parts, strict=True):
                if total.is_contiguous():
                    self.reduced[parameter] = part
                else:
                    self.reduced[parameter] = total.copy_(part)
        self._in_flight.clear()


class Overlap:
    """The reductions of one optimizer's windows under their last backward passes."""

    def __init__(
        self, group: dist.ProcessGroup, accumulate_dtype: torch.dtype | None
    ) -> None:
        self.group = group
        self.accumulate_dtype = accumulate_dtype
        self.buckets: list[Bucket] = []
        """The buckets of the next window, the same on all workers."""
        self.plan_mark = 0
        """A fingerprint of the buckets."""
        self.reduction: BucketReduction | None = None
        """The reduction of the window under way, once it has begun."""
        self._followed: GradientSum | None = None

    @property
    def is_used(self) -> bool:
        """True if a window begins its reduction with a vote. A single bucket would be
        complete when the pass is over, so there is nothing to gain.
        """
        return len(self.buckets) > 1

    def plan(self, parameters: Sequence[Tensor], counts: Sequence[int]) -> None:
        """Choose the buckets of the next window by how many workers had a gradient of
        each parameter in the last one, which all workers know.

        The parameters that were made last come first, as their gradients do. Those
        without a gradient in the last window are in no bucket, so that nothing waits
        for them: if they get one, it is reduced at the window's end.
        """
        used = [
            parameter
            for parameter, count in zip(parameters, counts, strict=True)
            if count
        ]
        dtype_of = partial(sum_dtype, accumulate_dtype=self.accumulate_dtype)
        self.buckets = buckets(used[::-1], dtype_of)
        places = {id(parameter): place for place, parameter in enumerate(parameters)}
        plan = [[places[id(each)] for each in bucket] for bucket in self.buckets]
        self.plan_mark = zlib.crc32(str(plan).encode())

    def begin(self, ballot: Ballot) -> BucketReduction:
        """Begin the window's reduction, if it has not begun."""
        if self.reduction is None:
            self.reduction = BucketReduction(
                self.group, self.buckets, self.accumulate_dtype, ballot
            )
        return self.reduction

    def end(self) -> None:
        if self.reduction is not None:
            self.reduction.end()
        self.reduction = None

    def arm(
        self, gradient_sum: GradientSum, ballot: weakref.WeakMethod[GetBallot]
    ) -> None:
        """Reduce under the next backward pass, if `gradient_sum` adds its gradients as
        they arrive; `ballot` returns this worker's vote as the pass begins.
        """
        self.disarm()
        reference = weakref.ref(self)
        sum_reference = weakref.ref(gradient_sum)

        def gradient_added(parameter: Tensor) -> None:
            overlap = reference()
            living_sum = sum_reference()
            get_ballot = ballot()
            if overlap is None or living_sum is None or get_ballot is None:
                return
            if overlap.reduction is None:
                overlap._begin_under_pass(get_ballot(), living_sum)
            if overlap.reduction is not None:
                overlap.reduction.gradient_added(parameter, living_sum)

        names.untraced(gradient_added)
        if gradient_sum.follow_additions(gradient_added):
            self._followed = gradient_sum

    def disarm(self) -> None:
        if self._followed is not None:
            self._followed.follow_additions(None)
            self._followed = None

    def _begin_under_pass(self, ballot: Ballot, gradient_sum: GradientSum) -> None:
        reduction = self.begin(ballot)
        reference = weakref.ref(gradient_sum)

        def pass_ended() -> None:
            living_sum = reference()
            if living_sum is not None:
                reduction.pass_ended(living_sum)

        # Outside of autograd's engine the window's end does the rest.
        names.call_at_the_end_of_backward(pass_ended)


BUCKET_BYTES = 25 * 2**20
"""The size of `DistributedDataParallel`'s buckets."""
LARGE_BYTES = 4 * 2**20
"""From here on a collective of its own costs less than packing and unpacking (measured
with gloo, two processes).
"""


def buckets(
    tensors: Iterable[Tensor], dtype_of: SumDtype = lambda tensor: tensor.dtype
) -> list[Bucket]:
    """Return the tensors that travel together: a large one alone, small ones of one
    dtype and device.
    """
    made: list[Bucket] = []
    bucket: Bucket = []
    size = 0
    for tensor in tensors:
        # By the size alone, which is the same on every worker, as a layout may not be.
        nbytes = tensor.numel() * dtype_of(tensor).itemsize
        if nbytes >= LARGE_BYTES:
            made.append([tensor])
            continue
        first = bucket[0] if bucket else tensor
        is_alike = tensor.device == first.device
        is_alike = is_alike and dtype_of(tensor) == dtype_of(first)
        if not is_alike or size + nbytes > BUCKET_BYTES:
            made.append(bucket)
            bucket = []
            size = 0
        bucket.append(tensor)
        size += nbytes
    if bucket:
        made.append(bucket)
    return made
