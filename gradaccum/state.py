"""The state of an accumulation: seven scalars with the same names in every backend and
every checkpoint.

A state is immutable: only the transitions in `gradaccum.transitions` compute a new
state. Each backend decides how the scalars are stored: as Python numbers, a `jax.Array`
or a MindSpore `Parameter`.
"""

from __future__ import annotations

import ctypes
import math
import sys
from typing import Any, NamedTuple

Scalar = Any
"""A Python number, or a framework's scalar of shape ``()``. The scalar may be on a
device. In compiled code it may be a traced value.
"""

FIELD_DTYPES = {
    "micro_step": "int32",
    "optimizer_step": "int32",
    "skipped_windows": "int32",
    "weight": "float32",
    "overflow": "bool",
    "loss_scale": "float32",
    "growth_tracker": "int32",
}
"""The dtype in which each field of a `State` is stored. `weight` is stored as float64
if the gradient sums are float64.
"""


class State(NamedTuple):
    """The counters of the open window and of the run so far, and the loss scale. Every
    field is a scalar of shape ``()``.
    """

    micro_step: Scalar
    """int32: the number of micro-batches in the open window."""
    optimizer_step: Scalar
    """int32: the number of updates applied since the start of the run."""
    skipped_windows: Scalar
    """int32: the number of windows that closed without an update."""
    weight: Scalar
    """float32 (float64 if the gradient sums are float64): the sum of the weights of the
    micro-batches in the open window.
    """
    overflow: Scalar
    """bool: True if a micro-batch of the open window is known to have had a non-finite
    gradient. With ``on_overflow="skip_window"`` such a gradient is detected only at the
    window's end, from the norm of the gradient sum.
    """
    loss_scale: Scalar
    """float32: the factor by which the loss is multiplied before differentiation. It is
    1 if there is no loss scaling.
    """
    growth_tracker: Scalar
    """int32: the number of windows without an overflow since the loss scale last
    changed.
    """


def initial_state(loss_scale: float = 1.0) -> State:
    """Return the state before the first micro-batch, as Python numbers."""
    return State(0, 0, 0, 0.0, False, float(loss_scale), 0)


def round_to_float32(value: float) -> float:
    """Return the float32 that is nearest to `value`, as a Python float.

    One float64 operation on float32 operands, followed by this rounding, gives the same
    bits as the float32 operation (S. Figueroa, "When is double rounding innocuous?",
    1995).
    """
    return ctypes.c_float(value).value


def largest_number(*, float64_weight: bool) -> float:
    """Return the largest finite number of the dtype in which a window's gradient sums
    are divided: float64 if `float64_weight` is true, else float32.
    `gradaccum.kit.decide` needs this number.
    """
    return sys.float_info.max if float64_weight else 3.4028234663852886e38


def has_exact_inverse(number: float) -> bool:
    """True if `number` and its inverse are powers of two in the normal range of
    float32. Multiplying by the inverse then gives the same bits as dividing by
    `number`.
    """
    return math.frexp(number)[0] == 0.5 and 2.0**-126 <= number <= 2.0**126


def at_rest(state: tuple[Scalar, ...], *, float64_weight: bool = False) -> State:
    """Return the state as Python numbers, with each float rounded to the dtype of its
    field.

    A weight beyond the range of that dtype becomes inf, and the window then ends
    without an update.
    """
    (
        micro_step,
        optimizer_step,
        skipped_windows,
        weight,
        overflow,
        loss_scale,
        growth_tracker,
    ) = state
    # This function runs once per micro-batch, so do not use `State._replace`, which
    # takes twice as long.
    return State(
        micro_step,
        optimizer_step,
        skipped_windows,
        weight if float64_weight else round_to_float32(weight),
        overflow,
        round_to_float32(loss_scale),
        growth_tracker,
    )


# The outcome of the last call. Flushing an empty window does nothing, so `applied`,
# `skipped` and `overflow` are then False.


class StepResult(NamedTuple):
    """The result of the last micro-batch, flush or discard. Its fields are Python
    numbers, or the framework's scalars inside compiled code.
    """

    applied: Scalar
    """bool: True if the last call closed a window with an update."""
    skipped: Scalar
    """bool: True if the last call closed a window without an update, because of an
    overflow, a norm above `skip_norm` or a total weight of 0.
    """
    overflow: Scalar
    """bool: True if the last call closed a window that contained a non-finite gradient.
    Also True if the last call dropped its micro-batch, because the micro-batch's
    gradient was not finite (``on_overflow="drop_micro_batch"``).
    """
    grad_norm: Scalar
    """float: the global 2-norm of the last closed window's gradient, without the loss
    scale and before clipping. It is inf if the gradient overflowed, 0 before the first
    window closes, and NaN if no option needs the norm.
    """
    loss_scale: Scalar
    """float: the scale for the next micro-batch's loss."""
    micro_step: Scalar
    """int: the number of micro-batches that are now in the open window."""
    optimizer_step: Scalar
    """int: the number of updates applied since the start of the run."""
    loss: Scalar = math.nan
    """float: the loss of the last closed window, without the loss scale. It is the loss
    of the large batch that consists of all micro-batches of the window, computed
    according to `reduction`. It is NaN unless the losses of all these micro-batches are
    known.
    """

    @property
    def closed(self) -> Scalar:
        """bool: True if the last call closed a window, False for a micro-batch inside a
        window.
        """
        return self.applied | self.skipped

    def __repr__(self) -> str:
        # With ``!s``, JAX prints ``grad_norm=0.5``, not ``Array(0.5, dtype=float32)``.
        values = (f"{name}={value!s}" for name, value in self._asdict().items())
        return f"{type(self).__name__}({', '.join(values)})"
