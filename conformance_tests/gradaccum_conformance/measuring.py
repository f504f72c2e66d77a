"""A record of measured errors and their bounds."""

from __future__ import annotations

from typing import NamedTuple


class Measured(NamedTuple):
    """One error and its bound, both relative."""

    label: str
    measured: float
    bound: float


class Errors:
    """What one test measured, in order."""

    def __init__(self) -> None:
        self.entries: list[Measured] = []

    def check(self, label: str, measured: float, bound: float) -> None:
        """Record the error, and fail if it is above its bound or not a number."""
        self.entries.append(Measured(label, float(measured), float(bound)))
        assert measured <= bound, (
            f"{label}: error {measured:.3g} above its bound {bound:.3g}"
        )
