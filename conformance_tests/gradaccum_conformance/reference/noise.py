"""The gradient noise scale of windows whose micro-batches are all still there, in plain
NumPy.

The mean gradient of w items has a squared norm of |G|^2 + tr(Sigma) / w on average. The
first micro-batch of each worker and the whole window make two equations for the two
unknowns.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np


class Noise:
    """The running means of both unknowns.

    Args:
        decay: theirs; None: nothing is measured.
    """

    def __init__(self, decay: float | None) -> None:
        self.decay, self.unknowns, self.scale = decay, np.zeros(2), math.nan

    def look(
        self, firsts: Sequence[tuple[float, float]], whole: tuple[float, float]
    ) -> None:
        """Take in a window that closes.

        Args:
            firsts: the items and the norm of the mean gradient of each worker's first
                micro-batch.
            whole: those of the window.
        """
        rows = [(sum(items for items, _ in firsts), len(firsts)), (whole[0], 1)]
        known = sum(items * norm**2 for items, norm in firsts), whole[0] * whole[1] ** 2
        if (
            self.decay is None
            or not firsts
            or not np.isfinite(known).all()
            or not all(known)
            or np.linalg.det(rows) >= 0
        ):
            return
        self.unknowns = self.decay * self.unknowns + (1 - self.decay) * np.linalg.solve(
            rows, known
        )
        square, trace = (float(value) for value in self.unknowns)
        self.scale = max(trace, 0.0) / square if square > 0 else math.inf
