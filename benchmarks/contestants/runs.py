"""The common parts of the quality question's frameworks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from benchmarks.contestants.digits import Parameters, Window

LARGE = "large batch"
GRADACCUM = "gradaccum"


class Run(Protocol):
    """One training run, from the parameters it was made with."""

    def epoch(self, windows: Iterable[Window]) -> None:
        """Train on every window."""
        ...

    def parameters(self) -> Parameters:
        """As they are now."""
        ...
