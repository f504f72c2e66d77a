"""A record of measured errors and their bounds."""

from __future__ import annotations

import math
from typing import NamedTuple


class Measurement(NamedTuple):
    """An error that a test measured, and its bound, both relative."""

    label: str
    measured: float
    bound: float

    @property
    def ratio(self) -> float:
        """The share of the bound: 0 for an exact match, inf for NaN and for any error
        above a bound of 0.
        """
        if self.measured == 0:
            return 0.0
        ratio = self.measured / self.bound if self.bound else math.inf
        return math.inf if math.isnan(ratio) else ratio

    def __str__(self) -> str:
        return f"{self.measured:.1e} ({self.ratio:.2g})"


class Errors:
    """What one test measured, in order."""

    def __init__(self) -> None:
        self.entries: list[Measurement] = []

    def check(self, label: str, measured: float, bound: float) -> None:
        """Record the error, and fail if it is above its bound or not a number."""
        self.entries.append(Measurement(label, float(measured), float(bound)))
        assert measured <= bound, (
            f"{label}: error {measured:.3g} above its bound {bound:.3g}"
        )
