"""The loss of a window as one large batch, from the losses of its micro-batches, combined as their gradients are.

The functions are transitions in the sense of `gradaccum.transitions`: they have the same source everywhere. A loss that nobody told is NaN,
and makes the window's NaN.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gradaccum.state import Scalar
from gradaccum.transitions import contribution

if TYPE_CHECKING:
    from gradaccum.options import Options
    from gradaccum.transitions import Fields, Where


def add_loss(total: Scalar, loss: Scalar, weight: Scalar, adds: Scalar, options: Options, where: Where) -> Scalar:
    """The sum of the open window's losses after a micro-batch; a dropped one, or one of weight 0, is no part of it.

    Args:
        total: as before it; 0 at the window's start.
        loss: the micro-batch's, a scalar, not scaled; NaN if it was not told.
        weight: its weight, a scalar.
        adds: bool: `gradaccum.kit.usable` of it.
        options: the validated options.
        where: the backend's `Where`.
    """
    return where(adds, total + contribution(weight, options) * loss, total)


def window_loss(total: Scalar, state: Fields, options: Options, where: Where) -> Scalar:
    """The loss of the window that ends: the weighted mean, the sum or the item mean by `reduction`; NaN for a window of weight 0.

    Args:
        total: from `add_loss`; of all workers, if several share the window.
        state: the state that was decided on.
        options: the validated options.
        where: the backend's `Where`.
    """
    weight = state[3]
    one = 0 * weight + 1
    loss = total if options.reduction == "sum" else total / where(weight > 0, weight, one)
    return where(weight > 0, loss, float("nan") + one)  # NaN times one would have the derivative NaN.
