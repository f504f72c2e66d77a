"""What a listener hears of a window: Python numbers, so that it needs no framework. What nobody told is NaN."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple


class ClosedWindow(NamedTuple):
    """One window, after its end. The flags and the norm are those of its `gradaccum.StepResult`."""

    optimizer_step: int
    """Updates applied since the start, this window's included: the same number again if the window was skipped."""
    applied: bool
    """It closed with an update."""
    skipped: bool
    """It closed without one (overflow, norm above `skip_norm`, or no weight)."""
    overflow: bool
    """It held a non-finite gradient."""
    grad_norm: float
    """Global 2-norm of its true gradient, before clipping; inf if it overflowed, NaN if nothing asked for it."""
    loss_scale: float
    """The scale for the losses of the next window; 1 when unused."""
    weight: float
    """Sum of the weights in it, of all workers where the optimizer knows them; NaN where nobody told."""
    micro_batches: float
    """This worker's micro-batches in it, an int; NaN where nobody told."""
    seconds: float
    """Time on the clock since the window before it closed; for the first one, since listening began."""
    loss: float = math.nan
    """Its loss as one large batch, by the reduction; NaN unless those of all micro-batches were told. Where the optimizer was told, of all
    workers; where the listening loop was, of this worker's items."""
    noise_scale: float = math.nan
    """The gradient noise scale in items, if the optimizer measures it."""


Listener = Callable[[ClosedWindow], object]
"""Called with each closed window; what it returns is dropped."""
