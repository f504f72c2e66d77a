"""The workers of one process group, each with a copy of the model: their windows are
added up at the window's end.

First the numbers of all workers are added up. They say which sums there are anywhere,
and a worker without a sum adds zeros. Then the sums are added up, small ones together.

A parameter that is sharded over the same workers has the gradient of all items on each.
Its sum is left as it is, and its norm is that of all shards.

Where the window's last micro-batch is known, large sums are reduced under its backward
pass; see `overlap`. Otherwise the reduction begins at the window's end. A worker that
runs out of data calls ``flush``, and takes part in the windows of the others until they
flush too.
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from gradaccum import UsageError, kit
from gradaccum.kit import Options, State, UntilWeight
from gradaccum_torch.arithmetic import sum_dtype
from gradaccum_torch.gradient_sum import Gradients, GradientSum, UpdateGuard
from gradaccum_torch.torch_private import names
from gradaccum_torch.workers import checks
from gradaccum_torch.workers.interface import ReducedWindow, Workers
from gradaccum_torch.workers.overlap import Ballot, BucketReduction, Overlap, buckets

IS_DISCARDED = True
"""Says that a worker has discarded the window whose sums are being reduced."""
CLOSE = 1e-3
"""The relative difference of norms up to which gradients may be copies: kernels round.
"""


@final
class WorkerGroup(Workers):
    """The workers of one process group."""

    several = True
    reduces_single_micro_batches = True

    def __init__(
        self,
        group: dist.ProcessGroup,
        optimizer: torch.optim.Optimizer,
        options: Options,
        module: DistributedDataParallel | None = None,
    ) -> None:
        self.group: dist.ProcessGroup = group
        self.optimizer = optimizer
        self.options = options
        self.module = module
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self.place = (self.rank, self.size)
        self.is_flushing = False
        self.all_flush = False
        """All workers have run out of micro-batches."""
        self.number = OPTIMIZERS.get(group.group_name, 0)
        """How many optimizers of this group were wrapped before this one."""
        OPTIMIZERS[group.group_name] = self.number + 1
        self.overlap = Overlap(group, options.accumulate_dtype)
        self.is_plan_outdated = False
        """The parameters of this worker have changed since the buckets were planned."""
        self.number_count = 0
        """How many numbers the extensions had in the last window."""
        self.parameters_changed()

    def parameters(self) -> list[Tensor]:
        return names.parameters_of(self.optimizer)

    def parameters_changed(self) -> None:
        lines = checks.describe_parameters(self.optimizer, self.module)
        text = "\n".join([str(self.number), *lines])
        self.mark = zlib.crc32(text.encode())
        """A fingerprint of this optimizer and its parameters, the same on each
        worker.
        """
        self.is_plan_outdated = True
        self.overlap.disarm()

    def take_part(self) -> None:
        """Keep the module from reducing by itself for as long as this object lives."""
        if self.module is not None:
            error = checks.comm_hook_error
            reduce_again = names.leave_reduction_out(self.module, error)
            weakref.finalize(self, reduce_again).atexit = False
            names.send_buffers(self.module)
            checks.share_module(self.optimizer, self.module)

    def require_parameters(self, parameters: Sequence[Tensor]) -> None:
        complete = [each for each in parameters if not names.is_sharded(each)]
        sharded = [each for each in parameters if names.is_sharded(each)]
        if self.module is not None:
            module_parameters = list(self.module.parameters())
            checks.require_parameters(self.module, module_parameters, complete)
            checks.require_none_ignored(self.module, complete)
        checks.require_same_workers(self.group, sharded)

    def require_no_collective(self, loss: Tensor) -> None:
        checks.require_no_collective(loss)

    def flush(
        self, close: Callable[[], None], between: Callable[[], None], is_open: bool
    ) -> None:
        self.is_flushing = True
        try:
            close()
            while not self.all_flush:
                between()
                close()
        finally:
            self.is_flushing = False

    # The reduction under the last backward pass.

    @property
    def is_reducing(self) -> bool:  # type: ignore[override]
        return self.overlap.reduction is not None

    def _can_overlap(self) -> bool:
        """True if a window's last micro-batch may be known, and nothing has to look at
        this worker's sums after it. The same on all workers.
        """
        options = self.options
        is_length_known = options.steps is not None
        is_length_known = is_length_known and not isinstance(options.steps, UntilWeight)
        looks_at_sums = options.on_overflow == "drop_micro_batch"
        looks_at_sums = looks_at_sums or options.separate_sums
        has_shards = any(names.is_sharded(each) for each in self.parameters())
        return is_length_known and not looks_at_sums and not has_shards

    def _rates(self) -> list[float]:
        return [float(group.get("lr", 0.0)) for group in self.optimizer.param_groups]

    def _ballot(self, is_open: bool = True) -> Ballot:
        bits = kit.rate_bits(self.mark, self.overlap.plan_mark, *self._rates())
        return Ballot(is_open, self.is_flushing, self.is_plan_outdated, bits)

    def expect_micro_batch(self, gradient_sum: GradientSum, is_last: bool) -> None:
        if is_last and self.overlap.is_used and self.size > 1:
            # Not the method itself: this object has to be free once it is not used.
            self.overlap.arm(gradient_sum, weakref.WeakMethod(self._ballot))
        else:
            self.overlap.disarm()

    def window_ended(self) -> None:
        self.overlap.disarm()
        if self.overlap.reduction is not None:
            self._abandon(self.overlap.reduction)

    def _abandon(self, reduction: BucketReduction) -> None:
        """Take part in the numbers that the others wait for, and say that this worker
        has discarded its window. They raise then: with a window of their own they would
        make an update that this worker does not make.
        """
        nothing = kit.initial_state(1.0)
        # A worker that is gone cannot be waited for, and nothing is left to be kept.
        with suppress(RuntimeError, UsageError):
            others = [0.0] * self.number_count
            if reduction.is_agreed:
                reduction.finish({})
                others += [0.0] * len(self.parameters())
            if reduction.is_open:
                self._add_numbers(nothing, {}, [IS_DISCARDED, *others])
        self.overlap.end()

    # The reduction at the end of a window.

    def all_reduce(
        self,
        state: State,
        gradients: Gradients,
        numbers: Sequence[float],
        guard: UpdateGuard,
        part: int | None = None,
    ) -> ReducedWindow:
        if self.module is not None:
            checks.require_no_join(self.module)
        if self.size == 1:
            self.all_flush = self.is_flushing
            return super().all_reduce(state, gradients, numbers, guard, part)
        try:
            if self.overlap.is_used:
                window = self._reduce_after_vote(state, gradients, numbers, guard)
            else:
                window, counts = self._add_numbers(state, gradients, numbers)
                if window.is_open:
                    window = self._reduce_at_once(window, counts, guard)
            self.number_count = len(numbers)
            if window.is_open and self.module is not None and part is None:
                names.send_buffers(self.module)
            return window
        except UsageError:  # Raised on every worker.
            raise
        except RuntimeError as error:
            raise kit.missing_worker_error(state, self.rank) from error
        finally:
            self.overlap.end()

    def _reduce_at_once(
        self, window: ReducedWindow, counts: list[int], guard: UpdateGuard
    ) -> ReducedWindow:
        window = self._add_sums(window, counts, guard)
        self._plan(counts)
        return window

    def _reduce_after_vote(
        self,
        state: State,
        gradients: Gradients,
        numbers: Sequence[float],
        guard: UpdateGuard,
    ) -> ReducedWindow:
        """Reduce as all workers have voted: in buckets, some of them under their last
        backward pass, or at once.
        """
        reduction = self.overlap.begin(self._ballot(state.micro_step > 0))
        self.all_flush = reduction.flushing_workers == self.size
        if not reduction.is_open:
            return ReducedWindow(gradients, 0.0, False, False, ())
        if not reduction.is_agreed:
            window, counts, _ = self._add_numbers_after_vote(
                state, gradients, [], numbers
            )
            return self._reduce_at_once(window, counts, guard)
        guard.is_broken = True
        rest = reduction.finish(gradients)
        parameters = self.parameters()
        has_contributed = [id(each) in reduction.contributions for each in parameters]
        window, rest_counts, contributions = self._add_numbers_after_vote(
            state, rest, has_contributed, numbers
        )
        # What came after its bucket was reduced: of another backward pass, or of a
        # parameter that is in no bucket.
        window = self._add_sums(window, rest_counts, guard)
        totals: Gradients = {}
        counts = []
        for parameter, contributed, rest_count in zip(
            parameters, contributions, rest_counts, strict=True
        ):
            counts.append(int(contributed) + rest_count)
            if contributed and rest_count:
                total = reduction.reduced[parameter] + window.gradients[parameter]
            elif contributed:
                total = reduction.reduced[parameter]
            elif rest_count:
                total = window.gradients[parameter]
            else:
                continue
            totals[parameter] = total
        self._plan(counts)
        return window._replace(gradients=totals)

    def _plan(self, counts: Sequence[int]) -> None:
        self.is_plan_outdated = False
        if self._can_overlap():
            self.overlap.plan(self.parameters(), counts)

    def _add_numbers_after_vote(
        self,
        state: State,
        gradients: Gradients,
        contributions: Sequence[float],
        numbers: Sequence[float],
    ) -> tuple[ReducedWindow, list[int], Sequence[float]]:
        """Return the window, the counts and the `contributions` of all workers.

        Raises:
            UsageError: a worker has discarded its window after the vote.
        """
        own_numbers = [not IS_DISCARDED, *contributions, *numbers]
        window, counts = self._add_numbers(state, gradients, own_numbers)
        discarded, *added = window.numbers
        if discarded:
            raise checks.discarded_error()
        first = len(contributions)
        return window._replace(numbers=added[first:]), counts, added[:first]

    def _add_numbers(
        self,
        state: State,
        gradients: Gradients,
        numbers: Sequence[float],
    ) -> tuple[ReducedWindow, list[int]]:
        """Return the window with the numbers of all workers, and by parameter how many
        workers have a sum.
        """
        parameters = self.parameters()
        rates = self._rates()
        bits = kit.rate_bits(self.mark, *rates)
        has_sparse = any(total.is_sparse for total in gradients.values())
        worker_numbers = [
            state.weight,
            state.overflow,
            state.micro_step > 0,
            self.is_flushing,
            has_sparse,
            *bits,
            *[parameter in gradients for parameter in parameters],
            *numbers,
        ]
        device = parameters[0].device
        added_numbers = torch.tensor(worker_numbers, dtype=torch.float64, device=device)
        dist.all_reduce(added_numbers, group=self.group)
        weight, overflows, opened, flushing, sparse, *rest = added_numbers.tolist()
        added_bits = rest[: len(bits)]
        counts = rest[len(bits) : len(bits) + len(parameters)]
        added = rest[len(bits) + len(parameters) :]
        if sparse:
            raise checks.sparse_error()
        if opened:
            kit.require_same_rates(rates, added_bits, self.size, self.rank)
        self.all_flush = flushing == self.size
        window = ReducedWindow(gradients, weight, overflows > 0, opened > 0, added)
        return window, [int(count) for count in counts]

    @torch.no_grad()
    def _add_sums(
        self,
        window: ReducedWindow,
        counts: list[int],
        guard: UpdateGuard | None = None,
    ) -> ReducedWindow:
        totals: Gradients = {}
        for parameter, count in zip(self.parameters(), counts, strict=True):
            if not count:
                continue
            total = window.gradients.get(parameter)
            if total is None:
                # A worker without a sum that others have adds zeros.
                dtype = sum_dtype(parameter, self.options.accumulate_dtype)
                total = torch.zeros_like(parameter, dtype=dtype)
            totals[parameter] = total
        self._require_equal_copies(list(totals.values()))
        if guard is not None:
            guard.is_broken = True
        copies = [each for each in totals.values() if not names.is_sharded(each)]
        for bucket in buckets(copies):
            all_reduce_together(bucket, self.group)
        return window._replace(gradients=totals)

    def ranks_with(self, holds: bool) -> list[int]:
        return ranks_with(holds, [self.group], self.parameters()[0].device)

    def _require_equal_copies(self, totals: Sequence[Tensor]) -> None:
        """Raise, on every worker, unless the copies of each shard have gradients of one
        norm; collective.
        """
        norms: dict[dist.ProcessGroup, list[Tensor]] = {}
        for total in totals:
            for axis, placement in enumerate(getattr(total, "placements", ())):
                mesh = names.mesh_of(total)
                if placement.is_replicate() and mesh.size(axis) > 1:
                    norm = torch.linalg.vector_norm(names.local(total)).double()
                    norms.setdefault(mesh.get_group(axis), []).append(norm)
        if not norms:
            return
        differences: list[Tensor] = []
        for group, group_norms in norms.items():
            bounds = torch.stack([*group_norms, *(-norm for norm in group_norms)])
            dist.all_reduce(bounds, dist.ReduceOp.MAX, group=group)
            most, minus_least = bounds.chunk(2)
            differences.append((most + minus_least > CLOSE * most).any().double())
        different = torch.stack(differences).sum()
        dist.all_reduce(different, group=self.group)
        if different:
            raise checks.unequal_copies_error()


def ranks_with(
    holds: bool, groups: Sequence[dist.ProcessGroup], device: torch.device
) -> list[int]:
    """Return the global ranks in `groups`, the dimensions of a mesh, on which something
    holds; collective.
    """
    marks = torch.zeros(dist.get_world_size(), dtype=torch.int32, device=device)
    marks[dist.get_rank()] = int(holds)
    for group in groups:
        dist.all_reduce(marks, group=group)
    return [rank for rank, mark in enumerate(marks.tolist()) if mark]


OPTIMIZERS: dict[str, int] = {}
"""How many optimizers were wrapped for the workers of a process group, by its name."""


def all_reduce_together(tensors: list[Tensor], group: dist.ProcessGroup) -> None:
    """Add up each tensor over the workers of `group`, in place."""
    if len(tensors) == 1 and tensors[0].is_contiguous():
        dist.all_reduce(tensors[0], group=group)
        return
    packed = names.flattened(tensors)
    dist.all_reduce(packed, group=group)
    for tensor, part in zip(tensors, names.unflattened(packed, tensors), strict=True):
        tensor.copy_(part)
