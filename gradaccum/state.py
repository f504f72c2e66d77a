"""The state of an accumulation: seven scalars with the same names in every backend and
every checkpoint.

A state is immutable. A backend decides where its scalars are stored (Python numbers,
`jax.Array`, MindSpore `Parameter`); only the transitions in `gradaccum.transitions`
compute a new state.
"""

from __future__ import annotations

import ctypes
import math
import sys
from typing import Any, NamedTuple

Scalar = Any
"""A Python number, or a scalar of the framework, shape ``()``: traced, compiled or on a
device.
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
"""The dtype of each field at rest. `weight` is float64 if the accumulators are float64.
"""


class State(NamedTuple):
    """The open window and the run so far. Every field is a scalar, shape ``()``."""

    micro_step: Scalar
    """int32: micro-batches in the open window."""
    optimizer_step: Scalar
    """int32: updates applied since the start."""
    skipped_windows: Scalar
    """int32: windows closed without an update."""
    weight: Scalar
    """float32 (float64 with float64 accumulators): sum of the weights in the open
    window.
    """
    overflow: Scalar
    """bool: a micro-batch of the open window is known to have had a non-finite
    gradient. Under ``"skip_window"`` only the norm at the window's end shows such a
    gradient.
    """
    loss_scale: Scalar
    """float32: the factor of the loss before differentiation; 1 when unused."""
    growth_tracker: Scalar
    """int32: clean windows since the loss scale last changed."""


def initial_state(loss_scale: float = 1.0) -> State:
    """Return the state before the first micro-batch, in Python numbers."""
    return State(0, 0, 0, 0.0, False, float(loss_scale), 0)


def round_to_float32(value: float) -> float:
    """Round `value` to the nearest float32, as a Python float.

    One float64 operation on float32 operands, followed by this rounding, has the same
    bits as the float32 operation (S. Figueroa, "When is double rounding innocuous?",
    1995).
    """
    return ctypes.c_float(value).value


def largest_number(*, float64_weight: bool) -> float:
    """Return the largest finite number of the dtype in which a window's sums are
    divided; see `gradaccum.decide`.
    """
    return sys.float_info.max if float64_weight else 3.4028234663852886e38


def has_exact_inverse(number: float) -> bool:
    """True if multiplying by the inverse has the same bits as dividing, because
    `number` and its inverse are normal float32 powers of two.
    """
    return math.frexp(number)[0] == 0.5 and 2.0**-126 <= number <= 2.0**126


def at_rest(state: tuple[Scalar, ...], *, float64_weight: bool = False) -> State:
    """Return a state of Python numbers with each float rounded to the dtype of its
    field.

    A total weight beyond the range of that dtype becomes inf, and its window makes no
    update.
    """
    fields = State(*state)
    weight = fields.weight if float64_weight else round_to_float32(fields.weight)
    return fields._replace(
        weight=weight, loss_scale=round_to_float32(fields.loss_scale)
    )


# The outcome of the last call, in scalars. The flush of an empty window does nothing:
# `applied`, `skipped` and `overflow` are False.


class StepResult(NamedTuple):
    """The result of the last micro-batch, flush or discard, in Python numbers, or in
    the framework's scalars inside compiled code.
    """

    applied: Scalar
    """bool: the call closed a window with an update."""
    skipped: Scalar
    """bool: the call closed a window without an update (overflow, norm above
    `skip_norm`, or no weight).
    """
    overflow: Scalar
    """bool: the call closed a window that contained a non-finite gradient, or it
    dropped its micro-batch because of a non-finite gradient.
    """
    grad_norm: Scalar
    """float: global 2-norm of the last closed window's true gradient, before clipping;
    inf if it overflowed; 0 before the first window closes; NaN if no option needs the
    norm.
    """
    loss_scale: Scalar
    """float: the scale for the next micro-batch's loss."""
    micro_step: Scalar
    """int: micro-batches now in the open window."""
    optimizer_step: Scalar
    """int: updates applied since the start."""
    loss: Scalar = math.nan
    """float: the last closed window's loss as one large batch, according to
    `reduction`, unscaled; NaN unless all of the window's losses are known.
    """

    @property
    def closed(self) -> Scalar:
        """bool: the call closed a window. False for a micro-batch inside a window."""
        return self.applied | self.skipped

    def __repr__(self) -> str:
        # ``grad_norm=0.5``, where JAX would write Array(0.5, dtype=float32)
        values = (f"{name}={value!s}" for name, value in self._asdict().items())
        return f"{type(self).__name__}({', '.join(values)})"
