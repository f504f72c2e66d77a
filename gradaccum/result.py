"""The outcome of the last event, in scalars."""

from __future__ import annotations

from typing import NamedTuple

from gradaccum.state import Scalar


class StepResult(NamedTuple):
    """What the last micro-batch, flush or discard did. Python numbers, or scalars of the framework inside compiled code."""

    applied: Scalar
    """bool: it closed a window with an update."""
    skipped: Scalar
    """bool: it closed a window without one (overflow, norm above `skip_norm`, or no weight)."""
    overflow: Scalar
    """bool: it closed a window that held a non-finite gradient, or its own gradient was dropped as such."""
    grad_norm: Scalar
    """float: global 2-norm of the last closed window's true gradient, before clipping; inf if it overflowed; 0 before any."""
    loss_scale: Scalar
    """float: the scale for the next micro-batch's loss."""
    micro_step: Scalar
    """int: micro-batches now in the open window."""
    optimizer_step: Scalar
    """int: updates applied since the start."""

    @property
    def closed(self) -> Scalar:
        """bool: it closed a window. False for a micro-batch in mid-window and for the flush of an empty window."""
        return self.applied | self.skipped
