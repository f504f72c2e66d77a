"""The loss of a window from those of its micro-batches, combined as their gradients are.

A loss may stay on its device until the window ends: it becomes a number in `of_window`, and only there does anything wait.
"""

from __future__ import annotations

import math
from typing import SupportsFloat

from gradaccum.options import Reduction


class Losses:
    """The losses and weights that were told of the open window.

    Args:
        reduction: as that of `gradaccum.wrap`.
    """

    def __init__(self, reduction: Reduction = "mean") -> None:
        self._reduction = reduction
        self._counted: list[tuple[SupportsFloat | None, float]] = []
        """The loss and the weight of each counted micro-batch; None: nobody told the loss."""
        self._under_way: list[tuple[SupportsFloat, float]] = []
        self._micro_batches = 0

    def tell(self, loss: SupportsFloat, weight: float) -> None:
        """A loss of the micro-batch under way, which may have several of one weight: they add up."""
        self._under_way.append((loss, weight))

    def count(self, *, dropped: bool = False) -> None:
        """The micro-batch under way is complete; a `dropped` one is no part of the window's sum, and not of its loss."""
        told, self._under_way = self._under_way, []
        self._micro_batches += 1
        if dropped:
            return
        if not told:
            self._counted.append((None, 1.0))
        elif told[0][1]:  # With weight 0 it contributes nothing, even if it is NaN.
            self._counted.append((sum(float(loss) for loss, _ in told) if told[1:] else told[0][0], told[0][1]))

    def drop(self) -> None:
        """The micro-batch under way was cleared before it was complete."""
        self._under_way = []

    def forget(self) -> None:
        """The window, or the micro-batch that was to open one, was discarded."""
        self._counted, self._under_way, self._micro_batches = [], [], 0

    def of_window(self, micro_batches: int) -> float:
        """The loss of the window of `micro_batches` that ends now, as the large batch has it; NaN unless all of them were told.

        The next window begins.
        """
        counted, complete = self._counted, self._micro_batches == micro_batches
        self.forget()
        pairs = [(float(loss), weight) for loss, weight in counted if loss is not None]
        total = math.fsum(weight for _, weight in pairs)
        if not complete or len(pairs) < len(counted) or not total:
            return math.nan
        summed = sum(loss * (weight if self._reduction == "mean" else 1.0) for loss, weight in pairs)
        return summed if self._reduction == "sum" else summed / total
