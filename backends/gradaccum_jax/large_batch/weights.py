"""The weight of a micro-batch: its number of items, the sum of per-item weights, or what the user's function says of it.

Nobody can look at a traced weight. If such a one is negative or not finite, it becomes NaN, and so do loss and gradient: a mistake shows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gradaccum import ArgumentTypeError, ArgumentValueError, GradAccumError
from gradaccum.kit import Scalar, explain, item_weights_error
from gradaccum_jax.checks import as_weight
from gradaccum_jax.large_batch.groups import MicroBatch
from gradaccum_jax.types import Array, DType

Weight = Callable[..., Any] | Array | None
"""A function of the micro-batch's arguments, an array of one number per item, or None: one for each item."""


def weight_of(micro_batch: MicroBatch, weight: Weight, unit: int | None, dtype: DType) -> Scalar:
    """The weight of a micro-batch: a Python number where the program knows it, else a scalar of `dtype`.

    Args:
        micro_batch: with its own part of per-item weights.
        weight: the user's.
        unit: how many items weigh 1 where the user gives no weight; None: the weight is 1, as nothing is divided by it.
        dtype: that of weights.

    Raises:
        ArgumentTypeError, ArgumentValueError: it is no real scalar >= 0, or the number of items is asked for and nobody knows it.
    """
    if callable(weight):
        return _loud(as_weight(weight(*micro_batch.arguments), dtype))
    if micro_batch.item_weights is not None:
        return _loud(jnp.sum(micro_batch.item_weights.astype(dtype)))
    return 1 if unit is None else known_items(micro_batch.items) / unit


def known_items(items: int | None) -> int:
    """The number of items of a micro-batch.

    Raises:
        ArgumentValueError: nobody knows it: it came from the user's own ``split``, and its arrays have different lengths.
    """
    if items is None:
        expected = "weight= a function of the micro-batch, as its number of items is not known"
        fix = "Write weight=lambda *micro_batch: ..., the number of items that its mean is taken over; or reduction='sum'."
        raise explain(ArgumentValueError, "weight", expected=expected, found="none beside split=", fix=fix)
    return items


def as_item_weights(weight: Array, items: int) -> Array:
    """Per-item weights as an array of shape (items,), checked as far as their values are known.

    Raises:
        ArgumentTypeError: they are no real numbers.
        ArgumentValueError: they have another shape, or one is negative or not finite.
    """
    array = weight if isinstance(weight, jax.Array) else np.asarray(weight)
    if array.shape != (items,):
        raise item_weights_error(items, f"shape {array.shape}")
    if array.dtype != bool and not jnp.issubdtype(array.dtype, jnp.integer) and not jnp.issubdtype(array.dtype, jnp.floating):
        fix = "Give one real number per item, or a callable of the micro-batch."
        raise explain(ArgumentTypeError, "weight", expected="real numbers", found=f"dtype {array.dtype}", fix=fix)
    if not isinstance(array, jax.core.Tracer):
        _require_sound(np.asarray(array), items)
    return array


def concrete(item_weights: Array) -> list[float] | None:
    """Per-item weights as Python numbers; None where there are none.

    Raises:
        ArgumentTypeError: they are traced, and the cuts, which are constants of the program, cannot depend on them.
    """
    if item_weights is None:
        return None
    if isinstance(item_weights, jax.core.Tracer):
        raise traced_weights_error()
    return [float(value) for value in np.asarray(item_weights)]


def traced_weights_error() -> GradAccumError:
    """The error for packing by weights that are traced: cuts are constants of the program."""
    fix = "Call it outside of jax.jit (it compiles by itself), or give weight= a NumPy array that the program has as a constant."
    expected = "per-item weights known while tracing"
    return explain(ArgumentTypeError, "micro_batch_weight", expected=expected, found="traced ones", fix=fix)


def _require_sound(values: np.ndarray[Any, Any], items: int) -> None:
    wide = values.astype(np.float64)
    bad = np.flatnonzero(~(np.isfinite(wide) & (wide >= 0)))
    if bad.size:
        raise item_weights_error(items, f"{wide[bad[0]]:g} for item {bad[0]}")


def _loud(weight: Scalar) -> Scalar:
    return jnp.where((weight >= 0) & jnp.isfinite(weight), weight, jnp.nan)
