"""Workers that hold parts of the same parameters (FSDP2, tensor parallel). The engine
reduces the gradients; the weight is reduced here.

FSDP2 averages gradients over its workers, so the weight is averaged too; after another
divisor the sum is multiplied once, at the window's end. Workers of tensor parallelism
see the same items.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from gradaccum import ArgumentValueError, UsageError
from gradaccum.kit import (
    State,
    explain,
    missing_worker_error,
    rate_bits,
    require_same_rates,
)
from gradaccum_torch.arithmetic import multiply
from gradaccum_torch.gradient_sum import Gradients, GradientSum, UpdateGuard
from gradaccum_torch.gradient_watch import delivering_zeros
from gradaccum_torch.torch_private.fsdp import Unit, units_holding
from gradaccum_torch.torch_private.names import parameters_of
from gradaccum_torch.workers.deferred import Deferred, SumInFSDP
from gradaccum_torch.workers.group import ranks_with
from gradaccum_torch.workers.interface import ReducedWindow, Workers


@final
class ShardGroup(Workers):
    """The workers of one device mesh."""

    several = True

    def __init__(
        self,
        mesh: DeviceMesh,
        shards: Shards,
        is_undivided: bool,
        deferred: Deferred | None = None,
    ) -> None:
        self._mesh = mesh
        self._shards = shards
        self._is_undivided = is_undivided
        """``reduction="sum"``: nothing divides the sum of all workers."""
        self._deferred = deferred
        if deferred is not None:
            self.make_gradient_sum = partial(SumInFSDP, deferred=deferred)
        rank = int((mesh.mesh.flatten() == dist.get_rank()).int().argmax())
        self.place = (rank, mesh.size())

    def all_reduce(
        self,
        state: State,
        gradients: Gradients,
        numbers: Sequence[float],
        guard: UpdateGuard,
        part: int | None = None,
    ) -> ReducedWindow:
        if part is None:
            self._shards.require_reduced()
        workers = 1 if self._is_undivided else self._shards.workers
        factors = {
            parameter: divisor / workers
            for parameter, divisor in self._shards.divisors().items()
        }
        weight, overflow, averages = self._add_numbers(state, numbers)
        guard.is_broken = True
        for parameter, total in gradients.items():
            multiply([total], factors.get(parameter, 1 / workers))
        sums = [
            average * (self._shards.workers if self._is_undivided else 1)
            for average in averages
        ]
        return ReducedWindow(gradients, weight, overflow, state.micro_step > 0, sums)

    def taking_part(self) -> AbstractContextManager[None] | None:
        return self._delivering_zeros() if self._shards.workers > 1 else None

    @contextmanager
    def _delivering_zeros(self) -> Iterator[None]:
        weightless: AbstractContextManager[None] = nullcontext()
        if self._deferred is not None:
            weightless = self._deferred.weightless()
        with self._shards.delivering_zeros(), weightless:
            yield

    def expect_micro_batch(self, gradient_sum: GradientSum, is_last: bool) -> None:
        if self._deferred is not None:
            self._deferred.expect_micro_batch(is_last)

    def window_ended(self) -> None:
        if self._deferred is not None:
            self._deferred.expect_micro_batch(is_last=False)
        self._shards.drop()
        self._shards.note()

    def require_parameters(self, parameters: Sequence[Tensor]) -> None:
        self._shards.add(parameters, is_waiting=self._deferred is not None)

    def ranks_with(self, holds: bool) -> list[int]:
        dimensions = range(self._mesh.ndim)
        groups = [self._mesh.get_group(dimension) for dimension in dimensions]
        return ranks_with(holds, groups, torch.device(self._mesh.device_type))

    @property
    def can_be_copied(self) -> bool:
        return self._shards.workers == 1

    def _add_numbers(
        self, state: State, numbers: Sequence[float]
    ) -> tuple[float, bool, list[float]]:
        """Return the average weight, whether a worker has an overflow, and the averages
        of `numbers`.
        """
        groups = self._shards.optimizer.param_groups
        rates = [float(group.get("lr", 0.0)) for group in groups]
        bits = rate_bits(*rates)
        rank = dist.get_rank()
        size = self._mesh.size()
        count = state.micro_step
        worker_numbers = [state.weight, state.overflow, count, count**2]
        added_numbers = torch.tensor(
            [*worker_numbers, *bits, *numbers],
            dtype=torch.float64,
            device=self._mesh.device_type,
        )
        try:
            for dimension in range(self._mesh.ndim):
                dist.all_reduce(added_numbers, group=self._mesh.get_group(dimension))
            weight, overflows, counts, squares, *rest = added_numbers.tolist()
        except RuntimeError as error:
            raise missing_worker_error(state, rank) from error
        if size * squares != counts**2:
            raise _unequal_error(state, rank)
        require_same_rates(rates, rest[: len(bits)], size, rank)
        averages = [total / size for total in rest[len(bits) :]]
        return weight / size, overflows > 0, averages


def _unequal_error(state: State, rank: int) -> UsageError:
    return explain(
        UsageError,
        f"the end of a window on rank {rank}",
        expected="as many micro-batches on every worker that shares parameters",
        found=f"{state.micro_step} here, and another number on another worker, as after"
        " opt.discard() on one of them",
        fix="Call opt.discard() on every worker.",
    )


# The units of FSDP2 that have an optimizer's parameters: the divisor of each gradient,
# and what FSDP2 has not reduced.


class Shards:
    """The units of FSDP2 that have an optimizer's parameters; none under tensor
    parallelism alone.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, units: Sequence[Unit]) -> None:
        self.optimizer = optimizer
        self.workers = max((unit.shards * unit.copies for unit in units), default=1)
        """The workers that have different items."""
        self._require_all(self._positions(), units)
        self._noted = [(unit, unit.divide_factor) for unit in units]
        """Each unit, and its factor as the window began."""

    def add(self, parameters: Sequence[Tensor], is_waiting: bool) -> None:
        """Take in the units of new `parameters`; `is_waiting`: FSDP2 waits with the
        earlier units, but not with the new ones.

        Raises:
            ArgumentValueError: FSDP2 does not have them all, or a new unit does not
                wait.
        """
        own = [*self._positions(), *parameters]
        units = units_holding(own)
        self._require_all(own, units)
        if is_waiting and len(units) > len(self._noted):
            fix = (
                "Give the optimizer all parameters before gradaccum.wrap, frozen ones"
                " too."
            )
            found = "parameters of a part of the model that reduces each micro-batch"
            raise explain(
                ArgumentValueError,
                "param_group",
                expected="parameters that gradient_sync= waits for",
                found=found,
                fix=fix,
            )
        self._noted = [(unit, unit.divide_factor) for unit in units]
        self.require_averages()

    def require_averages(self) -> None:
        if any(unit.is_summed_by_gloo for unit in self._units):
            found = (
                f"torch {torch.__version__}, in which gloo adds up what FSDP2 averages"
            )
            raise explain(
                UsageError,
                "optimizer",
                expected="torch 2.11 or newer for FSDP2 on a CPU",
                found=found,
                fix="Install it.",
            )

    def note(self) -> None:
        self._noted = [(unit, unit.divide_factor) for unit in self._units]

    def divisors(self) -> dict[Tensor, float]:
        """Return FSDP2's divisor of each parameter's sum; 1 where it has no part.

        Raises:
            UsageError: it was changed in the open window, or cannot be known.
        """
        if any(factor != unit.divide_factor for unit, factor in self._noted):
            raise _changed_error()
        known = {
            id(parameter): _divisor(unit)
            for unit in self._units
            for parameter in unit.parameters
        }
        return {
            parameter: known.get(id(parameter), 1.0) for parameter in self._positions()
        }

    def require_reduced(self) -> None:
        if any(unit.held() for unit in self._units):
            fix = (
                "Leave the call out, and write gradaccum.wrap(optimizer, ...,"
                ' module=fsdp_model, gradient_sync="window") to reduce once '
            )
            fix += (
                "per window. The window cannot be closed: call opt.discard() on every"
                " worker."
            )
            expected = "gradients that are reduced when the window ends"
            found = "gradients that FSDP2 was told not to reduce"
            raise explain(
                UsageError,
                "set_requires_gradient_sync, set_requires_all_reduce",
                expected=expected,
                found=found,
                fix=fix,
            )

    def delivering_zeros(self) -> AbstractContextManager[None]:
        """Make a backward pass gather and reduce as on the other workers, and add
        nothing.
        """
        return delivering_zeros(
            complete for unit in self._units for _, complete in unit.whole_parameters()
        )

    def drop(self) -> None:
        for unit in self._units:
            unit.drop()

    @property
    def _units(self) -> list[Unit]:
        return [unit for unit, _ in self._noted]

    def _positions(self) -> list[Tensor]:
        return parameters_of(self.optimizer)

    def _require_all(self, parameters: Sequence[Tensor], units: Sequence[Unit]) -> None:
        if self.workers == 1:
            return
        own = {id(parameter) for unit in units for parameter in unit.parameters}
        others = sum(
            parameter.requires_grad and id(parameter) not in own
            for parameter in parameters
        )
        if others:
            found = (
                f"{others} trainable parameters beside it, whose gradients nobody"
                " reduces"
            )
            fix = (
                "Call fully_shard(model) on the whole model too, or freeze them, or"
                " give them an optimizer of their own."
            )
            raise explain(
                ArgumentValueError,
                "optimizer",
                expected="parameters that fully_shard has",
                found=found,
                fix=fix,
            )


def _divisor(unit: Unit) -> float:
    if unit.reduces_by_hook:
        fix = "Leave set_all_reduce_hook out, and use a mesh of two dimensions."
        raise explain(
            UsageError,
            "set_all_reduce_hook",
            expected="no hook that reduces gradients",
            found="one",
            fix=fix,
        )
    factor = unit.divide_factor
    if factor is None:
        return float(unit.shards * unit.copies)
    # Where FSDP2 only sums, it is a division of its own, which that mesh has twice.
    if unit.shards == 1:
        found = (
            "one beside a shard dimension of size 1, where torch divides by it twice"
        )
        fix = "Leave set_gradient_divide_factor out."
        raise explain(
            UsageError,
            "set_gradient_divide_factor",
            expected="no factor on this mesh",
            found=found,
            fix=fix,
        )
    return float(factor)


def _changed_error() -> UsageError:
    found = "another factor than when the window began"
    fix = "Call opt.discard() on every worker: windows after it have the new factor."
    return explain(
        UsageError,
        "set_gradient_divide_factor",
        expected="a call before gradaccum.wrap",
        found=found,
        fix=fix,
    )
