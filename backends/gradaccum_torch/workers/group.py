"""The workers of one process group, each with a copy of the model.

When a window ends, the gradient sums are all-reduced in buckets. The weight and a few
other scalars follow, including flags that show which parameters had a gradient on at
least one worker. A worker that has no more data calls ``flush``, and then contributes
zeros to the other workers' windows until all workers have called ``flush``.

The gradient of a parameter that is sharded over the same workers already covers all
workers' items, so this gradient is not reduced again. The gradient norm includes all
shards.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import final
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from gradaccum import UsageError, kit
from gradaccum.kit import Options, State
from gradaccum_torch.gradient_sum import GradientSum, UpdateGuard
from gradaccum_torch.torch_private import names
from gradaccum_torch.workers import checks
from gradaccum_torch.workers.interface import ReducedWindow, Workers, add_numbers
from gradaccum_torch.workers.overlap import BucketReduction

OPTIMIZERS: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()
"""How many optimizers were wrapped for each process group. The keys are the groups
themselves, because torch may reuse the name of a group that was destroyed.
"""


@final
class WorkerGroup(Workers):
    """The workers of one process group, each with a copy of the model."""

    is_shared = True

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
        """Whether all workers have called ``flush``."""
        self.number = OPTIMIZERS.get(group, 0)
        """How many optimizers were wrapped for this process group before this one."""
        OPTIMIZERS[group] = self.number + 1
        self.reduction: BucketReduction | None = None
        """The object that adds up the open window's gradients over the workers during
        the window's last backward pass. It is None if no such backward pass has begun,
        and also if the gradients cannot be reduced before the pass ends.
        """
        self.trainable_ids: set[int] = set()
        """The ids of the parameters that were trainable when the window began."""
        self.window_ended()

    def parameters(self) -> list[Tensor]:
        return names.parameters_of(self.optimizer)

    def take_part(self) -> None:
        """Suppress `DistributedDataParallel`'s own gradient reduction while this object
        is alive.
        """
        if self.module is not None:
            reduce_again = names.leave_reduction_out(self.module)
            weakref.finalize(self, reduce_again).atexit = False
            names.send_buffers(self.module)
            checks.refuse_bare_steps(self.optimizer)

    def add_parameters(self, parameters: Sequence[Tensor]) -> None:
        if self.module is not None:
            module_copies = [each for each in parameters if not names.is_sharded(each)]
            reduced_parameters = names.reduced_parameters(self.module)
            checks.require_parameters(self.module, reduced_parameters, module_copies)
        for parameter in filter(names.is_sharded, parameters):
            if names.mesh_of(parameter).size() < self.size:
                self.norm_groups = [self.group]
        ranks = dist.get_process_group_ranks(self.group)
        checks.require_meshes_within(parameters, ranks)

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

    @property
    def is_reducing(self) -> bool:  # type: ignore[override]
        return self.reduction is not None and self.reduction.launch_count > 0

    def last_pass(
        self, gradient_sum: GradientSum, is_only_pass: bool
    ) -> AbstractContextManager[object]:
        has_shards = any(map(names.is_sharded, self.parameters()))
        if self.size > 1 and is_only_pass and not has_shards:
            reduction = self.begin(gradient_sum)
            # If there is only one bucket, it is complete only at the end of the
            # backward pass, so the reduction cannot begin earlier.
            if len(reduction.buckets) > 1 and gradient_sum.follow_additions(
                reduction.gradient_added
            ):
                self.reduction = reduction
        return nullcontext()

    def begin(
        self, gradient_sum: GradientSum, part: Sequence[Tensor] | None = None
    ) -> BucketReduction:
        # Include parameters that were frozen after the window began, because they may
        # already have a gradient sum.
        parameters = [
            parameter
            for parameter in (self.parameters() if part is None else part)
            if parameter.requires_grad or id(parameter) in self.trainable_ids
            if not names.is_sharded(parameter)
        ]
        dtype = self.options.accumulate_dtype
        return BucketReduction(self.group, parameters, gradient_sum, dtype)

    def all_reduce(
        self,
        state: State,
        gradient_sum: GradientSum,
        numbers: Sequence[float],
        guard: UpdateGuard,
        parameters: Sequence[Tensor] | None = None,
    ) -> ReducedWindow:
        if self.size == 1:
            self.all_flush = self.is_flushing
            return super().all_reduce(state, gradient_sum, numbers, guard, parameters)
        guard.is_broken = True
        reduction = self.reduction or self.begin(gradient_sum, parameters)
        window = self.finish(reduction, state, numbers)
        if window.is_open and self.module is not None and parameters is None:
            names.send_buffers(self.module)
        return window

    def finish(
        self,
        reduction: BucketReduction,
        state: State,
        numbers: Sequence[float],
        is_discarded: bool = False,
    ) -> ReducedWindow:
        self.reduction = None
        reduction.gradient_sum.follow_additions(None)
        while reduction.launch_count < len(reduction.buckets):
            reduction.launch()
        parameters = self.parameters()
        rates = names.learning_rates(self.optimizer)
        bits = kit.rate_bits(self.number, *rates)
        worker_numbers = [
            state.weight,
            state.overflow,
            state.micro_step > 0,
            self.is_flushing,
            is_discarded,
            *bits,
            *[id(parameter) in reduction.contributions for parameter in parameters],
            *numbers,
        ]
        self.device = parameters[0].device
        weight, overflows, opens, flushes, discards, *sums = add_numbers(
            worker_numbers, [self.group], self.device, state
        )
        reduction.wait()
        if discards:
            raise UsageError(
                "the end of a window: expected every worker to close the window,"
                " because the window's gradients are already being reduced; got a"
                " worker that called discard() instead. Call opt.discard() on every"
                " worker. To leave out a micro-batch on one worker, pass its loss with"
                " weight=0."
            )
        if opens:
            kit.require_same_rates(rates, sums[: len(bits)], self.size, self.rank)
        counts = sums[len(bits) : len(bits) + len(parameters)]
        extension_sums = sums[len(bits) + len(parameters) :]
        self.all_flush = flushes == self.size
        gradient_sums = reduction.gradient_sum.gradients()
        gradients = {
            parameter: gradient_sums[parameter]
            for parameter, count in zip(parameters, counts, strict=True)
            if parameter in gradient_sums and (count or names.is_sharded(parameter))
        }
        return ReducedWindow(
            gradients, weight, overflows > 0, opens > 0, extension_sums
        )

    def abandon(self, numbers: Sequence[float]) -> None:
        reduction = self.reduction
        if reduction is not None and reduction.launch_count:
            # `finish` raises an error if a window is discarded or a worker has exited.
            # Ignore the error, because this worker discards its window in any case.
            with suppress(RuntimeError):
                self.finish(
                    reduction, kit.initial_state(1.0), numbers, is_discarded=True
                )

    def window_ended(self) -> None:
        if self.reduction is not None:
            self.reduction.gradient_sum.follow_additions(None)
            self.reduction = None
        parameters = self.parameters()
        self.trainable_ids = {id(each) for each in parameters if each.requires_grad}
