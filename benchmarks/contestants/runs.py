"""The common parts of the frameworks in the questions about exactness: quality and
everyday.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from benchmarks.contestants.digits import Parameters, Window

LARGE = "large batch"
GRADACCUM = "gradaccum"

STEPS, EPOCHS, RATE, CLIP = 4, 3, 1e-2, 1.0
UPDATES = 9
"""Of everyday's ten micro-batches in three epochs: the schedule's length."""


class Run(Protocol):
    """One training run, from the parameters it was made with."""

    def epoch(self, windows: Iterable[Window]) -> None:
        """Train on every window."""
        ...

    def parameters(self) -> Parameters:
        """As they are now."""
        ...
