"""The workers that share a window; here one worker alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from gradaccum.kit import Options, State, missing_worker_error
from gradaccum_torch.gradient_sum import Gradients, GradientSum, UpdateGuard
from gradaccum_torch.gradient_watch import GradientWatch

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
    loss: float
    """The sum of the losses."""


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
    device = torch.device("cpu")
    """Where the stages add up their numbers."""
    make_gradient_sum: MakeGradientSum | None = None
    """Makes the place of the sum where the workers' engine keeps it."""

    def all_reduce(
        self,
        state: State,
        gradient_sum: GradientSum,
        loss: float,
        guard: UpdateGuard,
        parameters: Sequence[Tensor] | None = None,
    ) -> ReducedWindow:
        """Add up the windows of all workers; collective.

        - `guard`: is broken while the sums are written.
        - `parameters`: those whose sums are added up; None: all.
        """
        gradients = gradient_sum.gradients()
        is_open = state.micro_step > 0
        return ReducedWindow(gradients, state.weight, state.overflow, is_open, loss)

    def flush(
        self, close: Callable[[], None], between: Callable[[], None], is_open: bool
    ) -> None:
        """Close the open window by `close`, and as many more as other workers have; call
        `between` two of them.
        """
        if is_open:
            close()

    def stage_norm(self, state: State, norm: float, finite: bool) -> tuple[float, bool]:
        """Return the norm of all stages, and whether all are finite; collective.

        Raises:
            UsageError: a stage did not come in time.
        """
        if self.stages is None:
            return norm, finite
        numbers = [norm**2, 0.0]
        if state.overflow or not finite:
            numbers = [0.0, 1.0]
        square, overflows = add_numbers(numbers, [self.stages], self.device, state)
        if overflows:
            return math.inf, False
        return math.sqrt(square), True

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

    def abandon(self) -> None:
        """Take part in the reduction that has begun, and let all workers raise, because
        this one has discarded its window.
        """

    def window_ended(self) -> None:
        """Begin the next window."""

    def require_parameters(self, parameters: Sequence[Tensor]) -> None:
        """Raise unless the workers share each of these new `parameters`."""


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
