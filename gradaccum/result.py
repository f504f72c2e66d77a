"""The outcome of the last event, in scalars. The flush of an empty window is no event: the one before it stays."""

from __future__ import annotations

import math
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
    """float: global 2-norm of the last closed window's true gradient, before clipping; inf if it overflowed; 0 before any;
    NaN if nothing asked for it."""
    loss_scale: Scalar
    """float: the scale for the next micro-batch's loss."""
    micro_step: Scalar
    """int: micro-batches now in the open window."""
    optimizer_step: Scalar
    """int: updates applied since the start."""
    loss: Scalar = math.nan
    """float: the last closed window's loss as one large batch, by its reduction, unscaled; NaN unless all of its losses were told."""
    noise_scale: Scalar = math.nan
    """float: the gradient noise scale in items, see `gradaccum.wrap`; inf where the gradient cannot be told from noise; NaN before any
    window of several micro-batches whose norms are between 1e-15 and 1e15, the range of their squares in float32, and where it is not
    measured."""

    @property
    def closed(self) -> Scalar:
        """bool: it closed a window. False for a micro-batch in mid-window."""
        return self.applied | self.skipped
