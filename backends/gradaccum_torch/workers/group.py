"""The workers of one process group, each with a copy of the model: their windows are
added up at the window's end.

First the numbers of all workers are added up. They say which sums there are anywhere,
and a worker without a sum adds zeros. Then the sums are added up, small ones together.

A parameter that is sharded over the same workers has the gradient of all items on each.
Its sum is left as it is, and its norm is that of all shards.

No backward pass is known to be the last, so the reduction begins after it. A worker
that runs out of data calls ``flush``, and takes part in the windows of the others until
they flush too.
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from gradaccum import UsageError, kit
from gradaccum.kit import Options, State
from gradaccum_torch.arithmetic import sum_dtype
from gradaccum_torch.gradient_sum import Gradients, UpdateGuard
from gradaccum_torch.torch_private import names
from gradaccum_torch.workers import checks
from gradaccum_torch.workers.interface import ReducedWindow, Workers

BUCKET_BYTES = 25 * 2**20
"""The size of `DistributedDataParallel`'s buckets."""
LARGE_BYTES = 4 * 2**20
"""From here on a collective of its own costs less than packing and unpacking (measured
with gloo, two processes).
"""
CLOSE = 1e-3
"""The relative difference of norms up to which gradients may be copies: kernels round.
"""


@final
class WorkerGroup(Workers):
    """The workers of one process group."""

    several = True

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
        self.parameters_changed()

    def parameters(self) -> list[Tensor]:
        return [
            parameter
            for group in self.optimizer.param_groups
            for parameter in group["params"]
        ]

    def parameters_changed(self) -> None:
        lines = checks.describe_parameters(self.optimizer, self.module)
        text = "\n".join([str(self.number), *lines])
        self.mark = zlib.crc32(text.encode())
        """A fingerprint of this optimizer and its parameters, the same on each
        worker.
        """

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
            window, counts = self._add_numbers(state, gradients, numbers)
            if window.is_open:
                window = self._add_sums(window, counts, guard)
                if self.module is not None and part is None:
                    names.send_buffers(self.module)
            return window
        except UsageError:  # Raised on every worker, before any sum has changed.
            raise
        except RuntimeError as error:
            raise kit.missing_worker_error(state, self.rank) from error

    def _add_numbers(
        self, state: State, gradients: Gradients, numbers: Sequence[float]
    ) -> tuple[ReducedWindow, list[int]]:
        """Return the window with the numbers of all workers, and by parameter how many
        workers have a sum.
        """
        parameters = self.parameters()
        rates = [float(group.get("lr", 0.0)) for group in self.optimizer.param_groups]
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
        self, window: ReducedWindow, counts: list[int], guard: UpdateGuard
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
        guard.is_broken = True
        copies = [each for each in totals.values() if not names.is_sharded(each)]
        for bucket in buckets(copies):
            all_reduce_together(bucket, self.group)
        return window._replace(gradients=totals)

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


OPTIMIZERS: dict[str, int] = {}
"""How many optimizers were wrapped for the workers of a process group, by its name."""


def buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield the tensors that travel together: a large one alone, small ones of one
    dtype and device.
    """
    bucket: list[Tensor] = []
    size = 0
    for tensor in tensors:
        # By the size alone, which is the same on every worker, as a layout may not be.
        if tensor.nbytes >= LARGE_BYTES:
            yield [tensor]
            continue
        first = bucket[0] if bucket else tensor
        is_alike = (tensor.dtype, tensor.device) == (first.dtype, first.device)
        if not is_alike or size + tensor.nbytes > BUCKET_BYTES:
            yield bucket
            bucket = []
            size = 0
        bucket.append(tensor)
        size += tensor.nbytes
    if bucket:
        yield bucket


def all_reduce_together(tensors: list[Tensor], group: dist.ProcessGroup) -> None:
    """Add up each tensor over the workers of `group`, in place."""
    if len(tensors) == 1 and tensors[0].is_contiguous():
        dist.all_reduce(tensors[0], group=group)
        return
    packed = names.flattened(tensors)
    dist.all_reduce(packed, group=group)
    for tensor, part in zip(tensors, names.unflattened(packed, tensors), strict=True):
        tensor.copy_(part)
