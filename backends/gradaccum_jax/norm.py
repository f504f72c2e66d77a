"""The global norm of an accumulator, robust and with no temporary of the parameters' size.

Squares of large finite elements overflow and those of tiny ones vanish; then, and only then, the norm is taken again of everything times
a power of two that brings it into range. So a norm that is not finite means a gradient that is not.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gradaccum_jax.control_flow import ControlFlow, once
from gradaccum_jax.folds import sum_of
from gradaccum_jax.square_sum import WRITES_SQUARES, square_sum


def measure(accumulator: Any, dtype: Any, control_flow: ControlFlow) -> tuple[Any, Any]:
    """Global 2-norm and whether every element is finite: scalars of `dtype` and bool.

    Args:
        accumulator: the tree of sums.
        dtype: float32 or float64. A norm of finite elements beyond its range is reported as its largest number.
        control_flow: how the second measurement is left out.
    """
    leaves = _real_leaves(accumulator, dtype)
    squares = _total([square_sum(leaf) for leaf in leaves], dtype)
    plain = (squares > _smallest_sum(dtype)) & (squares < jnp.inf)
    return once(~plain, lambda _: _scaled(leaves, squares), (_root(squares), plain), control_flow)


def _scaled(leaves: list[Any], squares: Any) -> tuple[Any, Any]:
    """The norm of what has no sum of `squares` in range: finite times the smaller power unless an element is not."""
    power = 0.75 * int(jnp.finfo(squares.dtype).maxexp)
    first = scale = jnp.where(squares < 1, 2.0**power, 2.0**-power).astype(squares.dtype)
    sums, so_far = [], jnp.zeros_like(squares)
    for leaf in leaves:
        sums.append(square_sum(leaf * scale))
        if WRITES_SQUARES:  # Never below 0. The dependence makes XLA scale one leaf at a time, so only one temporary lives.
            so_far = so_far + sums[-1]
            scale = jnp.where(so_far < 0, so_far, scale)
    total = _total(sums, squares.dtype)
    finite = total < jnp.inf
    norm = jnp.minimum(_root(total) / first, float(np.finfo(squares.dtype).max))
    return jnp.where(finite, norm, jnp.inf), finite


def _root(total: Any) -> Any:
    """The square root, with a derivative at 0: that of a window of no gradient is 0, not 0 x inf."""
    positive = total > 0
    return jnp.where(positive, jnp.sqrt(jnp.where(positive, total, 1)), total)


def _total(sums: list[Any], dtype: Any) -> Any:
    """Stacked, each sum is a kernel of its own where XLA writes squares; there only their chain's end is kept from being copied."""
    if WRITES_SQUARES or not sums:
        return sum_of(jnp.stack([sum(sums, jnp.zeros((), dtype)), jnp.zeros((), dtype)]))
    return sum_of(jnp.stack(sums))


def _smallest_sum(dtype: Any) -> float:
    """Below it, too many squares may have vanished to be left out; 1e-24 in float32."""
    kind = np.finfo(dtype)
    return float(kind.tiny) / float(kind.eps) ** 2


def _real_leaves(accumulator: Any, dtype: Any) -> list[Any]:
    leaves = [leaf for leaf in jax.tree.leaves(accumulator) if leaf.size]
    parts = [(leaf.real, leaf.imag) if jnp.iscomplexobj(leaf) else (leaf,) for leaf in leaves]
    return [part.astype(dtype) for pair in parts for part in pair]
