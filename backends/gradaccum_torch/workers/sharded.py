"""Workers that hold parts of the same parameters (FSDP2, tensor parallel). The engine reduces the gradients; the weight is reduced here.

FSDP2 averages gradients over its workers, unless the user has set another divisor. The window's sum is then the average of w_i g_i, so its
weight is the average too. Workers of tensor parallelism see the same items: the average of their weights is the weight. Where FSDP2 divides
by something else, or where the sum itself is wanted, the sum is multiplied once, at the window's end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from gradaccum import UsageError
from gradaccum.kit import State, explain, joined, missing_worker_error, rate_bits, require_same_rates
from gradaccum_torch.sums import multiply
from gradaccum_torch.workers.deferred import Deferred
from gradaccum_torch.workers.shards import Shards
from gradaccum_torch.workers.workers import Joined, OwnSum, Shares, Sums, learning_rates


@final
class ShardGroup(OwnSum):
    """The workers of one device mesh.

    Args:
        mesh: the mesh of the sharded parameters; of all of its dimensions.
        shards: what FSDP2 makes of their gradients.
        undivided: ``reduction="sum"``: the sum over the workers is wanted, not their average.
        deferred: holds what FSDP2 is to reduce at the window's end; None: it reduces each micro-batch.
    """

    several = True

    def __init__(self, mesh: DeviceMesh, shards: Shards, undivided: bool, deferred: Deferred | None = None) -> None:
        self._mesh, self._shards, self._undivided, self.deferred = mesh, shards, undivided, deferred
        self.not_own, self._index = False, _index(mesh)
        self.place = self._index, mesh.size()

    def join(self, fields: State, sums: Sums, zeros: Callable[[int], Tensor], numbers: Sequence[float]) -> Joined:
        if self.not_own:
            return Joined(fields, sums, numbers)
        self._shards.require_reduced()
        factors = [divisor / (1 if self._undivided else self._shards.workers) for divisor in self._shards.divisors()]
        weight, overflow, averages = self._added_up(fields, numbers)
        self.not_own = any(factor != 1 for factor in factors)
        for total, factor in zip(sums, factors, strict=True):
            multiply([] if total is None else [total], factor)
        # After an update that raised, this may come again. The average of averages changes nothing.
        whole = [average * (self._shards.workers if self._undivided else 1) for average in averages]
        return Joined(joined(fields, weight, overflow), list(sums), whole)

    def taking_part(self) -> AbstractContextManager[None] | None:
        return self._delivering_zeros() if self._shards.workers > 1 else None

    @contextmanager
    def _delivering_zeros(self) -> Iterator[None]:
        with self._shards.delivering_zeros(), nullcontext() if self.deferred is None else self.deferred.weightless():
            yield

    def shares(self, fields: State, loss: float) -> Shares:
        size = self._mesh.size()
        numbers = torch.zeros(2 * size + 1, dtype=torch.float64, device=self._mesh.device_type)
        numbers[self._index], numbers[size + self._index], numbers[-1] = fields.weight, loss, fields.overflow
        for dimension in range(self._mesh.ndim):
            dist.all_reduce(numbers, group=self._mesh.get_group(dimension))
        *both, overflows = numbers.tolist()
        return Shares(both[:size], self._shards.workers, self._shards.divisors(), overflows > 0, both[size:])

    def own(self, shares: Shares) -> tuple[float, float, list[float]]:
        own = self._shards.divisors()
        saved = shares.divisors or [1.0] * len(own)
        place = self._index, self._mesh.size(), self._shards.workers
        return shares.weight_of(*place), shares.loss_of(*place), [before / now for before, now in zip(saved, own, strict=True)]

    def window_ended(self) -> None:
        self._shards.drop()
        self._shards.note()
        self.not_own = False

    def require_parameters(self, parameters: Sequence[Tensor]) -> None:
        self._shards.add(parameters, waiting=self.deferred is not None)

    def require_own_sum(self, call: str) -> None:
        if self.not_own:
            fix = "Call opt.flush() on every worker to make the update that is due, or opt.discard() on every worker."
            found = "a window that is multiplied by the workers already, whose update raised"
            raise explain(UsageError, call, expected="to be called before the window's end", found=found, fix=fix)

    def require_no_closure(self) -> None:
        if self.deferred is not None or self._undivided:
            # The inner optimizer reads the gradient of a closure at once.
            fix = 'Leave gradient_sync= out, and write reduction="mean".'
            raise explain(UsageError, "closure", expected="gradients that FSDP2 averages in each micro-batch", found="other ones", fix=fix)

    def require_no_copy(self) -> None:
        if self._shards.workers > 1:
            fix = "Save opt.state_dict(), and wrap anew where it is loaded."
            raise explain(UsageError, "copy, pickle", expected="an optimizer whose model can be copied", found="one under FSDP2", fix=fix)

    def _added_up(self, fields: State, others: Sequence[float]) -> tuple[float, bool, list[float]]:
        """The average weight, whether any worker has an overflow, and the averages of `others`."""
        rates, rank, size = learning_rates(self._shards.optimizer), dist.get_rank(), self._mesh.size()
        own = [fields.weight, fields.overflow, fields.micro_step, fields.micro_step**2, *rate_bits(rates), *others]
        numbers = torch.tensor(own, dtype=torch.float64, device=self._mesh.device_type)
        try:
            for dimension in range(self._mesh.ndim):
                dist.all_reduce(numbers, group=self._mesh.get_group(dimension))
            weight, overflows, micro_batches, squares, *rest = numbers.tolist()
        except RuntimeError as error:
            raise missing_worker_error(fields, rank) from error
        if size * squares != micro_batches**2:
            raise _unequal_error(fields, rank)
        bits = len(rest) - len(others)
        require_same_rates(rates, rest[:bits], size, rank)
        return weight / size, overflows > 0, [total / size for total in rest[bits:]]


def _index(mesh: DeviceMesh) -> int:
    """The place of this worker in `mesh`."""
    index = 0
    for place, size in zip(mesh.get_coordinate() or (), mesh.shape, strict=True):
        index = index * size + place
    return index


def _unequal_error(fields: State, rank: int) -> UsageError:
    return explain(
        UsageError,
        f"the end of a window on rank {rank}",
        expected="as many micro-batches on every worker that shares parameters",
        found=f"{fields.micro_step} here, and another number on another worker, as after opt.discard() on one of them",
        fix="Call opt.discard() on every worker.",
    )
