"""The global norm of an accumulator, robust and with no temporary of the parameters' size.

Squares of large finite elements overflow and those of tiny ones vanish; then, and only then, the norm is taken again of everything times
a power of two that brings it into range. So a norm that is not finite means a gradient that is not.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from gradaccum_jax.control_flow import ControlFlow, once
from gradaccum_jax.devices import explicitly_sharded, partitioned
from gradaccum_jax.folds import sum_of

WRITES_SQUARES = jax.__version_info__ < (0, 10)
COLUMNS = 16
"""Fewer wait for one another, more cost arithmetic: 4, 6, 10 and 5 GB/s at 1, 4, 16 and 32, measured on one core."""
LONGEST_COLUMN, LONGEST_ALONE = 2**16, 2**10
"""A column adds up in order, and beyond this length its rounding errors would show: 1e-6 of the sum here. The second: the same for one
of fewer than four, which a library adds up one by one: 1e-5."""
MOST_GROUPS = 2**12


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


def square_sum(leaf: Any) -> Any:
    """The sum of squares of a real floating array of any shape: a scalar of its dtype."""
    if not WRITES_SQUARES or explicitly_sharded(leaf):
        return _plain(leaf)
    return lax.platform_dependent(leaf, cpu=_on_cpu, default=_plain)


def _on_cpu(leaf: Any) -> Any:
    """Rows and columns of what XLA has partitioned would first be gathered."""
    return lax.cond(partitioned(), _plain, _by_product, leaf)


def _plain(leaf: Any) -> Any:
    return jnp.sum(leaf * leaf)


def _by_product(leaf: Any) -> Any:
    columns = math.gcd(COLUMNS, leaf.size)
    groups = _groups(leaf.size // columns, LONGEST_COLUMN if columns >= 4 else LONGEST_ALONE)
    if groups is None:
        return _plain(leaf)
    split = leaf.reshape(groups, -1, columns)
    product = lax.dot_general(split, split, (((1,), (1,)), ((0,), (0,))), precision=lax.Precision.HIGHEST)
    return jnp.sum(jnp.diagonal(product, axis1=1, axis2=2))


def _groups(rows: int, longest: int) -> int | None:
    """In how many equal groups of at most `longest` to take the `rows`; None: there is no such number."""
    return next((groups for groups in range(-(-rows // longest), MOST_GROUPS) if rows % groups == 0), None)
