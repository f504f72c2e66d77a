"""The sum of squares of an array, in one pass and with no temporary of its size.

XLA does that by itself, but on the CPU only since JAX 0.10. Before, it writes out the squares and compiles several kernels for each
array, which took most of the time it needs for a model of hundreds of them. There the sum is the diagonal of the product of a matrix of 16
columns with itself: a call of a library, with nothing to compile, and no element waits for the one before it.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from gradaccum_jax.devices import explicitly_sharded, partitioned

WRITES_SQUARES = jax.__version_info__ < (0, 10)
COLUMNS = 16
"""Fewer wait for one another, more cost arithmetic: 4, 6, 10 and 5 GB/s at 1, 4, 16 and 32, measured on one core."""
LONGEST_COLUMN, LONGEST_ALONE = 2**16, 2**10
"""A column adds up in order, and beyond this length its rounding errors would show: 1e-6 of the sum here. The second: the same for one
of fewer than four, which a library adds up one by one: 1e-5."""
MOST_GROUPS = 2**12


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
