"""Whether a window's gradient survives the cast to the dtype that the inner optimizer is given.

A finite float32 sum may be more than float16 can hold. Only leaves whose dtype has a smaller range than the sum's are looked at, and
of those only the largest magnitude: dividing and rounding are monotonic. So it costs nothing for float32, bfloat16 and float64
parameters, and with float32 masters.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from gradaccum_jax.dtypes import wider
from gradaccum_jax.folds import all_of


def representable(accumulator: Any, divisor: Any, dtypes: list[Any]) -> Any:
    """Whether every element of ``(accumulator / divisor).astype(dtype)`` is finite where that of the accumulator is: a bool scalar.

    Args:
        accumulator: the tree of sums.
        divisor: a scalar; not yet that of clipping, which is decided on after this.
        dtypes: one per leaf: the inner optimizer's gradient's.
    """
    held = zip(jax.tree.leaves(accumulator), dtypes, strict=True)
    return all_of([_largest(leaf) / divisor < _limit(dtype) for leaf, dtype in held if leaf.size and _is_narrower(dtype, leaf.dtype)])


def _is_narrower(dtype: Any, held: Any) -> bool:
    """A division by a float32 makes float32 even of a half-precision sum."""
    if not jnp.issubdtype(held, jnp.inexact):
        return False
    quotient = wider(held, jnp.float32)
    return bool(jnp.finfo(dtype).maxexp < jnp.finfo(quotient).maxexp)


def _limit(dtype: Any) -> float:
    """The smallest magnitude that rounds to infinity: half a step beyond the largest number. 65520 for float16."""
    largest = float(jnp.finfo(dtype).max)
    return largest + 2.0 ** (math.frexp(largest)[1] - int(jnp.finfo(dtype).nmant) - 2)


def _largest(leaf: Any) -> Any:
    """Row by row: XLA on the CPU compiles reductions of whole matrices to scalars, side by side, for minutes."""
    parts = (leaf.real, leaf.imag) if jnp.iscomplexobj(leaf) else (leaf,)
    rows = [jnp.atleast_1d(part.astype(jnp.promote_types(part.dtype, jnp.float32))) for part in parts]
    return jnp.stack([jnp.max(jnp.maximum(jnp.max(part, axis=-1), -jnp.min(part, axis=-1))) for part in rows]).max()
