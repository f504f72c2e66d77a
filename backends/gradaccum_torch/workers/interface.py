"""The workers that share a window; here one worker alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol

import torch.distributed as dist
from torch import Tensor

from gradaccum import UsageError
from gradaccum.kit import Options, State, explain
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
    numbers: Sequence[float]
    """The extensions' numbers, added up."""


class Stages(Protocol):
    """The stages of a pipeline, as one of them sees them."""

    def norm(self, state: State, norm: float, finite: bool) -> tuple[float, bool]: ...


class Workers:
    """One worker alone: its window is the complete one."""

    several = False
    """There are others, so that a window's end must `all_reduce`."""
    place: tuple[int, int] | None = (0, 1)
    """The rank and the number of workers to which a saved part of a sum belongs; None:
    to any.
    """
    group: dist.ProcessGroup | None = None
    """The process group of the workers; None: this worker is alone, or a mesh of
    several groups shares its parameters.
    """
    reduces_single_micro_batches = False
    """They can reduce under the backward pass of a window of one micro-batch."""
    is_reducing = False
    """The sums of the window under way are no longer those of this worker alone."""
    stages: Stages | None = None
    """The other stages of a pipeline, which share the norm of the window."""
    make_gradient_sum: MakeGradientSum | None = None
    """Makes the place of the sum where the workers' engine keeps it."""

    def all_reduce(
        self,
        state: State,
        gradients: Gradients,
        numbers: Sequence[float],
        guard: UpdateGuard,
        part: int | None = None,
    ) -> ReducedWindow:
        """Add up the windows of all workers; collective.

        - `guard`: is broken from here on while the sums are written.
        - `part`: the sums are a part, of that number on all workers.
        """
        return ReducedWindow(
            gradients, state.weight, state.overflow, state.micro_step > 0, numbers
        )

    def flush(
        self, close: Callable[[], None], between: Callable[[], None], is_open: bool
    ) -> None:
        """Close the open window by `close`, and as many more as others have; call
        `between` two of them.
        """
        if is_open:
            close()

    def ranks_with(self, holds: bool) -> list[int]:
        """Return the global ranks of the workers on which something holds;
        collective.
        """
        return [0] if holds else []

    def stage_norm(self, state: State, norm: float, finite: bool) -> tuple[float, bool]:
        """Return the norm of all stages, and whether all are finite; collective."""
        if self.stages is None:
            return norm, finite
        return self.stages.norm(state, norm, finite)

    def taking_part(self) -> AbstractContextManager[object] | None:
        """Return a context in which a backward pass delivers zeros, if others wait for
        it at weight 0.
        """
        return None

    def take_part(self) -> None:
        """Begin to share windows, once nothing can refuse the optimizer any more."""

    def expect_micro_batch(self, gradient_sum: GradientSum, is_last: bool) -> None:
        """Prepare for the next micro-batch, which adds to `gradient_sum`.

        - `is_last`: it is known to end the window, and its backward passes come next.
        """

    def window_ended(self) -> None:
        """Begin the next window."""

    def parameters_changed(self) -> None:
        """Take note of other parameters, of other dtypes, or of new groups."""

    def require_parameters(self, parameters: Sequence[Tensor]) -> None:
        """Raise unless the workers share each of these new `parameters`."""

    def require_no_collective(self, loss: Tensor) -> None:
        """Raise unless the backward pass of a `loss` of weight 0 can be left out: other
        workers would wait for this one in a collective.
        """

    def require_graph(self, loss: Tensor) -> Tensor:
        if not loss.requires_grad:
            raise explain(
                UsageError,
                "loss",
                expected="one of the model, because every backward pass is that of all"
                " workers",
                found="one without a graph",
                fix="Run the model on any batch on this worker too, and give its loss"
                " with weight=0.",
            )
        return loss

    @property
    def can_be_copied(self) -> bool:
        return not self.several and self.stages is None
