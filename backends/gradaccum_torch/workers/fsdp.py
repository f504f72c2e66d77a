"""Workers with different shards of the same parameters (FSDP2, tensor parallelism).
torch itself reduces the gradients of the sharded model. The code in this file reduces
the windows' weights.

FSDP2 averages gradients over its workers, so the weight is averaged too. In tensor
parallelism, all workers process the same items, so the average equals each
worker's weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from gradaccum.kit import State, rate_bits, require_same_rates
from gradaccum_torch.gradient_sum import GradientSum, UpdateGuard
from gradaccum_torch.gradient_watch import delivering_zeros
from gradaccum_torch.torch_private.fsdp import units_holding
from gradaccum_torch.torch_private.names import (
    is_sharded,
    learning_rates,
    mesh_of,
    parameters_of,
)
from gradaccum_torch.workers import checks
from gradaccum_torch.workers.deferred import DeferredReduction, SumInFSDP
from gradaccum_torch.workers.interface import ReducedWindow, Workers, add_numbers


@final
class ShardGroup(Workers):
    """The workers of one device mesh over which parameters are sharded."""

    is_shared = True

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        mesh: DeviceMesh,
        is_undivided: bool,
        deferred_reduction: DeferredReduction | None = None,
    ) -> None:
        self.optimizer = optimizer
        self.mesh = mesh
        self.groups = mesh.get_all_groups()
        self.device = mesh.device_type
        self.is_undivided = is_undivided
        """True if ``reduction="sum"``. In that case the sum over all workers is not
        divided.
        """
        self.deferred_reduction = deferred_reduction
        if deferred_reduction is not None:
            self.make_gradient_sum = partial(
                SumInFSDP, deferred_reduction=deferred_reduction
            )
        rank = mesh.mesh.flatten().tolist().index(dist.get_rank())
        self.place = (rank, mesh.size())
        self.add_parameters(())
        self.divisor = max((unit.workers for unit in self.units), default=1)
        """The number of workers over which FSDP2 averages gradients. It is 1 if there
        is only tensor parallelism.
        """

    def all_reduce(
        self,
        state: State,
        gradient_sum: GradientSum,
        numbers: Sequence[float],
        guard: UpdateGuard,
        parameters: Sequence[Tensor] | None = None,
    ) -> ReducedWindow:
        if self.deferred_reduction is None and parameters is None:
            checks.require_reduced_units(self.units)
        guard.is_broken = True
        gradients = gradient_sum.gradients()
        weight, overflow, averages = self.average(state, numbers)
        divisors: dict[int, float] = {}
        for unit in self.units:
            divisors.update(dict.fromkeys(map(id, unit.parameters), unit.divisor))
        divisor = 1 if self.is_undivided else self.divisor
        for parameter, total in gradients.items():
            factor = divisors.get(id(parameter), 1) / divisor
            if factor != 1:
                total.detach().mul_(factor)
        if self.is_undivided:
            averages = [average * self.divisor for average in averages]
        is_open = state.micro_step > 0
        return ReducedWindow(gradients, weight, overflow, is_open, averages)

    def average(
        self, state: State, numbers: Sequence[float]
    ) -> tuple[float, bool, list[float]]:
        """Return the average weight of the workers' windows, whether there was an
        overflow on any worker, and the average of each of `numbers` over the workers.
        """
        rates = learning_rates(self.optimizer)
        # Compare the number of micro-batches too, because it differs between workers if
        # only some workers have called discard().
        bits = rate_bits(state.micro_step, *rates)
        size = self.mesh.size()
        has_smaller_mesh = any(
            is_sharded(parameter) and mesh_of(parameter).size() < size
            for parameter in parameters_of(self.optimizer)
        )
        worker_numbers = [state.weight, state.overflow, has_smaller_mesh, *bits]
        weight, overflows, smaller_meshes, *sums = add_numbers(
            [*worker_numbers, *numbers], self.groups, self.device, state
        )
        self.norm_groups = self.groups if smaller_meshes else ()
        require_same_rates(rates, sums[: len(bits)], size, dist.get_rank())
        averages = [total / size for total in sums[len(bits) :]]
        return weight / size, overflows > 0, averages

    def weightless_pass(self) -> AbstractContextManager[object] | None:
        if self.divisor == 1:
            return None
        gathered_parameters: list[Tensor] = []
        for unit in self.units:
            gathered_parameters += unit.gathered_parameters()
        return delivering_zeros(gathered_parameters)

    def last_pass(
        self, gradient_sum: GradientSum, is_only_pass: bool
    ) -> AbstractContextManager[object]:
        if self.deferred_reduction is None:
            return nullcontext()
        return self.deferred_reduction.last_pass()

    def window_ended(self) -> None:
        for unit in self.units:
            unit.drop()

    def add_parameters(self, parameters: Sequence[Tensor]) -> None:
        # `parameters` is not used, because the optimizer already contains them.
        every_parameter = parameters_of(self.optimizer)
        units = units_holding(every_parameter)
        checks.require_all_sharded(every_parameter, units)
        self.units = units
