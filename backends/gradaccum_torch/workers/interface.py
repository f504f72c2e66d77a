"""The workers that share a window; here one worker alone."""

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
"""Returns the norm of sums that the same workers hold, and whether they are finite."""
MakeGradientSum = Callable[
    [Callable[[], list[Tensor]], GradientWatch, Options], GradientSum
]


class ReducedWindow(NamedTuple):
    """A window that several workers share, as all of them have it."""

    gradients: Gradients
    weight: float
    overflow: bool
    is_open: bool
    """Some worker has a micro-batch."""
    numbers: Sequence[float]
    """The extensions' numbers, added up."""


class Workers:
    """One worker alone: its window is the complete one."""

    is_shared = False
    """Other workers share the window, so that its end must `all_reduce`."""
    place = (0, 1)
    """The rank and the number of workers to which a saved part of a sum belongs."""
    group: dist.ProcessGroup | None = None
    """The process group of the workers; None: this worker is alone, or a mesh of
    several groups shares its parameters.
    """
    is_reducing = False
    """The reduction of the open window has begun."""
    stages: dist.ProcessGroup | None = None
    """The stages of a pipeline, each with an optimizer of its own: one norm, one clip and
    one decision on overflow for all of them.
    """
    norm_groups: Sequence[dist.ProcessGroup] = ()
    """The dimensions of the workers' mesh, if a part of the workers has a parameter
    alone.
    """
    device: torch.device | str = "cpu"
    """Where workers add up their numbers."""
    make_gradient_sum: MakeGradientSum | None = None
    """Makes the place of the sum where the workers' engine keeps it."""

    def all_reduce(
        self,
        state: State,
        gradient_sum: GradientSum,
        numbers: Sequence[float],
        guard: UpdateGuard,
        parameters: Sequence[Tensor] | None = None,
    ) -> ReducedWindow:
        """Add up the windows of all workers; collective.

        - `guard`: is broken while the sums are written.
        - `parameters`: those whose sums are added up; None: all.
        """
        gradients = gradient_sum.gradients()
        is_open = state.micro_step > 0
        return ReducedWindow(gradients, state.weight, state.overflow, is_open, numbers)

    def flush(
        self, close: Callable[[], None], between: Callable[[], None], is_open: bool
    ) -> None:
        """Close the open window by `close`, and as many more as other workers have; call
        `between` two of them.
        """
        if is_open:
            close()

    def norm(
        self, state: State, sums: Gradients, measure: Measure
    ) -> tuple[float, bool]:
        """Return the norm of the window, and whether all of it is finite; collective
        over `norm_groups` and the stages.

        Raises:
            UsageError: a worker did not come in time.
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
        """Return the square of the norm of this worker's parameters, each divided by the
        number of workers that have it, and whether all of it is finite.
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
        """Return a context in which a backward pass delivers zeros, if other workers wait
        for the pass of a loss of weight 0.
        """
        return None

    def last_pass(
        self, gradient_sum: GradientSum, is_only_pass: bool
    ) -> AbstractContextManager[object]:
        """Return a context for a backward pass that ends the window, under which its sums
        may be reduced already.

        - `is_only_pass`: the micro-batch will most likely have no other backward pass.
        """
        return nullcontext()

    def take_part(self) -> None:
        """Begin to share windows, once nothing can refuse the optimizer any more."""

    def abandon(self, numbers: Sequence[float]) -> None:
        """Take part in the reduction that has begun, and let all workers raise, because
        this one has discarded its window.
        """

    def window_ended(self) -> None:
        """Begin the next window."""

    def add_parameters(self, parameters: Sequence[Tensor]) -> None:
        """Share these new parameters of the optimizer too, or raise."""


def root_of_sum(
    square: float,
    is_finite: bool,
    groups: Sequence[dist.ProcessGroup],
    device: torch.device | str,
    state: State,
) -> tuple[float, bool]:
    """Return the root of the sum of squares over the workers, and whether all are
    finite; collective.
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
    """Return the sums of `numbers` over the workers of all `groups`, which are the
    dimensions of a mesh; collective.

    Raises:
        UsageError: a worker did not come in time.
    """
    added_numbers = torch.tensor(numbers, dtype=torch.float64, device=device)
    try:
        for group in groups:
            dist.all_reduce(added_numbers, group=group)
        return added_numbers.tolist()
    except RuntimeError as error:
        raise missing_worker_error(state, dist.get_rank()) from error
