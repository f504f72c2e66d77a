"""The interface of workers that share windows, and the class for a single worker."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from gradaccum.kit import Options, State, missing_worker_error
from gradaccum_torch.gradient_sum import Gradients, GradientSum, UpdateGuard
from gradaccum_torch.gradient_watch import GradientWatch
from gradaccum_torch.torch_private.names import is_sharded, mesh_of

Measure = Callable[[Gradients], tuple[float, bool]]
"""A function that takes gradient sums, and returns their norm and whether all of them
are finite. All sums in one call must be stored by the same set of workers. Each sum is
either sharded over this set, or every worker of the set has a full copy of the sum.
"""
MakeGradientSum = Callable[
    [Callable[[], list[Tensor]], GradientWatch, Options], GradientSum
]


class ReducedWindow(NamedTuple):
    """A window whose gradients, weight and other numbers have been added up over all
    workers. FSDP2 averages the gradients instead, so with FSDP2 the weight and the
    numbers are averages too.
    """

    gradients: Gradients
    weight: float
    overflow: bool
    is_open: bool
    """Whether any worker has a micro-batch in the window."""
    numbers: Sequence[float]
    """The numbers that the window's extensions returned, added up or averaged over the
    workers in the same way as the gradients.
    """


class Workers:
    """The workers that share windows. The base class itself represents a single worker
    that shares its windows with no other worker.
    """

    is_shared = False
    """Whether other workers share the window. If they do, `all_reduce` has to be called
    when the window ends.
    """
    is_alone = False
    """Whether the user passed ``process_group="alone"``."""
    place = (0, 1)
    """This worker's rank, and the number of workers. Checkpoints contain both."""
    group: dist.ProcessGroup | None = None
    """The process group of the workers. It is None if there is only one worker, or if
    the parameters are sharded over a mesh.
    """
    is_reducing = False
    """Whether the reduction of the open window's gradients has begun."""
    stages: dist.ProcessGroup | None = None
    """The process group of the stages of a pipeline, each of which has its own
    optimizer. All stages use the same gradient norm for clipping, and make the same
    decision on overflow.
    """
    norm_groups: Sequence[dist.ProcessGroup] = ()
    """The process groups over which the workers' parts of the squared gradient norm are
    added up. The sequence is empty unless some parameters exist only on some of the
    workers.
    """
    device: torch.device | str = "cpu"
    """The device on which workers add up numbers such as weights."""
    make_gradient_sum: MakeGradientSum | None = None
    """The function that creates the gradient sum if FSDP2 stores the sum
    (``gradient_sync="window"``). In all other cases it is None, and
    `gradient_sum.make_gradient_sum` creates the sum.
    """

    def all_reduce(
        self,
        state: State,
        gradient_sum: GradientSum,
        numbers: Sequence[float],
        guard: UpdateGuard,
        parameters: Sequence[Tensor] | None = None,
    ) -> ReducedWindow:
        """Add up the gradient sums, weights and `numbers` of all workers. This is a
        collective call.

        - `guard`: the object whose flag `is_broken` is set before the sums are
          modified. The caller clears the flag.
        - `parameters`: the parameters whose sums are added up. None means all
          parameters.
        """
        gradients = gradient_sum.gradients()
        is_open = state.micro_step > 0
        return ReducedWindow(gradients, state.weight, state.overflow, is_open, numbers)

    def flush(
        self, close: Callable[[], None], between: Callable[[], None], is_open: bool
    ) -> None:
        """Call ``close()`` once for the open window, and once for each window that the
        other workers close after it. Call ``between()`` between consecutive calls to
        ``close()``.
        """
        if is_open:
            close()

    def norm(
        self, state: State, sums: Gradients, measure: Measure
    ) -> tuple[float, bool]:
        """Return the norm of the window's gradient over all workers, and whether the
        gradient is finite. This call is collective over `norm_groups` and the stages of
        a pipeline.

        Raises:
            UsageError: the reduction over the workers failed or timed out.
        """
        if self.norm_groups:
            square, is_finite = self._share_of_square(sums, measure)
            norm, is_finite = root_of_sum(
                square, is_finite, self.norm_groups, self.device, state
            )
        else:
            norm, is_finite = measure(sums)
        if self.stages is None:
            return norm, is_finite
        is_finite = is_finite and not state.overflow
        return root_of_sum(norm**2, is_finite, [self.stages], self.device, state)

    def _share_of_square(self, sums: Gradients, measure: Measure) -> tuple[float, bool]:
        """Return this worker's share of the squared gradient norm, and whether the
        gradients are finite. The squared norm of each parameter's gradient is divided
        by the number of workers that share the parameter, because each of these workers
        computes the same norm.
        """
        parts: dict[Any, Gradients] = {}
        for parameter, total in sums.items():
            mesh = mesh_of(total) if is_sharded(total) else None
            parts.setdefault(mesh, {})[parameter] = total
        square = 0.0
        is_finite = True
        for mesh, part in parts.items():
            norm, is_part_finite = measure(part)
            square += norm * norm / (self.place[1] if mesh is None else mesh.size())
            is_finite = is_finite and is_part_finite
        return square, is_finite

    def weightless_pass(self) -> AbstractContextManager[object] | None:
        """Called for a loss of weight 0. If other workers are waiting for this worker's
        backward pass, return a context in which the pass produces zeros. Otherwise
        return None.
        """
        return None

    def last_pass(
        self, gradient_sum: GradientSum, is_only_pass: bool
    ) -> AbstractContextManager[object]:
        """Return a context for a backward pass of the last micro-batch of a window.
        Inside the context, the workers may begin to reduce the window's gradients
        before the pass ends.

        - `is_only_pass`: whether the micro-batch is expected to have no other backward
          pass.
        """
        return nullcontext()

    def take_part(self) -> None:
        """Start sharing windows with the other workers. Called after all checks of the
        optimizer have passed.
        """

    def abandon(self, numbers: Sequence[float]) -> None:
        """Called when this worker discards its window. If the reduction of the window
        has already begun, finish it. The other workers then raise an error.
        """

    def window_ended(self) -> None:
        """Begin the next window."""

    def add_parameters(self, parameters: Sequence[Tensor]) -> None:
        """Called when `parameters` are added to the optimizer. Raise if the workers
        cannot share the gradients of these parameters.
        """


def root_of_sum(
    square: float,
    is_finite: bool,
    groups: Sequence[dist.ProcessGroup],
    device: torch.device | str,
    state: State,
) -> tuple[float, bool]:
    """Return the square root of the sum of `square` over all workers, and whether
    `is_finite` is true on all workers. This is a collective call.
    """
    numbers = [square, 0.0] if is_finite else [0.0, 1.0]
    square, overflows = add_numbers(numbers, groups, device, state)
    if overflows:
        return math.inf, False
    return math.sqrt(square), True


def add_numbers(
    numbers: Sequence[float],
    groups: Sequence[dist.ProcessGroup],
    device: torch.device | str,
    state: State,
) -> list[float]:
    """Return the sum of each of `numbers` over the workers of all `groups`. If there
    are several groups, they must be the dimensions of one mesh. This is a collective
    call.

    Raises:
        UsageError: the reduction over the workers failed or timed out.
    """
    added_numbers = torch.tensor(numbers, dtype=torch.float64, device=device)
    try:
        for group in groups:
            dist.all_reduce(added_numbers, group=group)
        return added_numbers.tolist()
    except RuntimeError as error:
        raise missing_worker_error(state, dist.get_rank()) from error
