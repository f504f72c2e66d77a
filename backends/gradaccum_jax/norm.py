"""The global norm of an accumulator, robust and with no temporary of the parameters' size.

Squares of large finite elements overflow, and squares of tiny ones vanish. Then the norm is that of the elements times a power of two that
brings them into range. So a norm that is not finite means a gradient that is not finite. Large arrays are measured again for it, only then.

XLA compiles a kernel for each sum of squares. Small arrays of one shape are squared and added up element by element, times each power, and
only the result is summed: one kernel for many arrays. XLA may have sharded arrays of one shape differently; so large ones are summed each
by itself.

XLA sums squares in one pass with no temporary, but on the CPU only since JAX 0.10. Before, it writes out the squares. There the sum of
squares of a large array is the diagonal of the product of a matrix of 16 columns with itself: a library call, and no element waits for the
one before it. A program that XLA partitions, or one for another device, has no use for that.
"""

from __future__ import annotations

import functools
import math
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from gradaccum.kit import Scalar
from gradaccum_jax.control_flow import once
from gradaccum_jax.devices import explicitly_sharded, partitioned
from gradaccum_jax.folds import sum_of
from gradaccum_jax.types import Array, DType, Leaves, Tree, typeof
from gradaccum_jax.varying import ShardAxes, shards_of

WRITES_SQUARES = jax.__version_info__ < (0, 10)
SMALL = 2**14
"""Elements of an array at most that is measured together with others: 64 KiB, if devices have to exchange one."""
MOST_TOGETHER = 16
"""Beyond it XLA takes longer to compile a kernel than it takes for two."""
COLUMNS = 16
"""With fewer columns additions wait for one another; more cost arithmetic. 4, 6, 10 and 5 GB/s at 1, 4, 16 and 32, on one core."""
LONGEST_COLUMN, LONGEST_ALONE = 2**16, 2**10
"""A column adds up in order. Beyond the first length its rounding errors would show: 1e-6 of the sum here. The second length is for fewer
than four columns, which the library adds up one by one: 1e-5."""
MOST_GROUPS = 2**12
Groups = list[tuple[tuple[str, ...], Leaves]]
"""Arrays that are measured together, and the mesh axes along which they are sharded inside `jax.shard_map`."""
Sums = list[tuple[tuple[str, ...], Array]]
"""As `Groups`: large arrays, or sums of squares."""


def measure(accumulator: Tree, dtype: DType, shard_axes: ShardAxes = None) -> tuple[Scalar, Scalar]:
    """Global 2-norm and whether every element is finite: scalars of `dtype` and bool.

    Args:
        accumulator: the tree of sums.
        dtype: float32 or float64. A norm of finite elements beyond its range is reported as its largest number.
        shard_axes: the mesh axes along which arrays are sharded inside `jax.shard_map`: the norm is that of all shards.
    """
    groups = _grouped(_real_leaves(accumulator, dtype), shard_axes)
    small = [(axes, leaves) for axes, leaves in groups if _together(leaves[0])]
    large = [(axes, leaf) for axes, (leaf, *_) in groups if not _together(leaf)]
    zero = jnp.zeros((), dtype)
    scaled = _total([(axes, _scaled_sums(leaves)) for axes, leaves in small], jnp.zeros(3, dtype))
    squares = scaled[0] + _total([(axes, square_sum(leaf)) for axes, leaf in large], zero)
    plain = (squares > _smallest_sum(dtype)) & (squares < jnp.inf)
    if large:
        norm = once(~plain, lambda _: _out_of_range(large, squares, scaled), _root(squares))
    else:
        norm = sum_of(jnp.stack([lax.select(plain, _root(squares), _out_of_range([], squares, scaled)), zero]))
    return norm, norm < jnp.inf


def _grouped(leaves: Leaves, shard_axes: ShardAxes) -> Groups:
    groups: dict[Any, Leaves] = {}
    for place, leaf in enumerate(leaves):
        groups.setdefault(typeof(leaf) if _together(leaf) else place, []).append(leaf)
    parts = [together[start : start + MOST_TOGETHER] for together in groups.values() for start in range(0, len(together), MOST_TOGETHER)]
    return [(shards_of(part[0], shard_axes), part) for part in parts]


def _together(leaf: Array) -> bool:
    return bool(leaf.size <= SMALL)


def _scaled_sums(leaves: Leaves) -> Array:
    """The sums of squares of small arrays of one shape, times each of the powers: shape ``(3,)``.

    The last power is for elements below 1 alone. Larger ones would leave the range, where their derivative is 0 x inf.
    """
    ones = [1] * leaves[0].ndim
    powers = _powers(leaves[0].dtype)
    bounds = np.where(powers > 1, 1, np.inf).astype(powers.dtype).reshape(-1, *ones)
    # The barrier keeps XLA from squaring the powers, which overflow, in place of the elements.
    powers = lax.optimization_barrier(jnp.asarray(powers)).reshape(-1, *ones)  # type: ignore[no-untyped-call]
    squares = [jnp.square(jnp.clip(leaf, -bounds, bounds) * powers) for leaf in leaves]
    return jnp.sum(functools.reduce(operator.add, squares), range(1, powers.ndim))


def _powers(dtype: DType) -> Any:
    """As they are, for a sum of squares that overflows, and for one below 1: shape ``(3,)``."""
    power = 0.75 * int(jnp.finfo(dtype).maxexp)
    return np.array([1, 2.0**-power, 2.0**power], dtype)


def _out_of_range(large: Sums, squares: Scalar, scaled: Array) -> Scalar:
    """The norm of arrays whose sum of `squares` is out of range. Times the smaller power, it is finite unless an element is not."""
    which = jnp.where(squares < 1, 2, 1)
    power = jnp.asarray(_powers(squares.dtype))[which]
    sums, so_far, scale = [], jnp.zeros_like(squares), power
    for axes, leaf in large:
        sums.append((axes, square_sum(leaf * scale)))
        if WRITES_SQUARES and not axes:
            # Never below 0. The dependence makes XLA scale one large array at a time, so only one temporary lives.
            so_far = so_far + sums[-1][1]
            scale = jnp.where(so_far < 0, so_far, scale)
    total = scaled[which] + _total(sums, jnp.zeros_like(squares))
    norm = jnp.minimum(_root(total) / power, float(np.finfo(squares.dtype).max))
    return jnp.where(total < jnp.inf, norm, jnp.inf)


def _root(total: Scalar) -> Scalar:
    """The square root, with derivative 0 at 0: a window of zero gradients has derivative 0, not 0 x inf."""
    positive = total > 0
    return jnp.where(positive, jnp.sqrt(jnp.where(positive, total, 1)), total)


def _total(sums: Sums, zero: Array) -> Array:
    """The sum of all: of arrays that are sharded, the devices' sums are added up; a copy counts once."""
    alike: dict[tuple[str, ...], list[Array]] = {}
    for axes, one in sums:
        alike.setdefault(axes, []).append(one)
    parts = [lax.psum(_folded(ones, zero), axes) if axes else _folded(ones, zero) for axes, ones in alike.items()]  # type: ignore[no-untyped-call]
    return _folded(parts, zero) if len(parts) > 1 else sum(parts, zero)


def _folded(sums: list[Array], zero: Array) -> Array:
    """Where XLA writes squares, stacked sums would each be a kernel of its own. There the sums are chained, and only the end is folded."""
    return sum_of(jnp.stack([sum(sums, zero), zero] if WRITES_SQUARES else sums))


def _smallest_sum(dtype: DType) -> float:
    """Below this sum, the squares that vanished may count; 1e-24 in float32."""
    kind = np.finfo(dtype)
    return float(kind.tiny) / float(kind.eps) ** 2


def _real_leaves(accumulator: Tree, dtype: DType) -> Leaves:
    leaves = [leaf for leaf in jax.tree.leaves(accumulator) if leaf.size]
    parts = [(leaf.real, leaf.imag) if jnp.iscomplexobj(leaf) else (leaf,) for leaf in leaves]
    return [part.astype(dtype) for pair in parts for part in pair]


def square_sum(leaf: Array) -> Scalar:
    """The sum of squares of a real floating array: a scalar of its dtype."""
    if not WRITES_SQUARES or _together(leaf) or explicitly_sharded(leaf):
        return _plain(leaf)
    return lax.platform_dependent(leaf, cpu=lambda leaf: lax.cond(partitioned(), _plain, _by_product, leaf), default=_plain)


def _plain(leaf: Array) -> Scalar:
    return jnp.sum(leaf * leaf)


def _by_product(leaf: Array) -> Scalar:
    columns = math.gcd(COLUMNS, leaf.size)
    groups = _groups(leaf.size // columns, LONGEST_COLUMN if columns >= 4 else LONGEST_ALONE)
    if groups is None:
        return _plain(leaf)
    split = leaf.reshape(groups, -1, columns)
    product = lax.dot_general(split, split, (((1,), (1,)), ((0,), (0,))), precision=lax.Precision.HIGHEST)
    return jnp.sum(jnp.diagonal(product, axis1=1, axis2=2))


def _groups(rows: int, longest: int) -> int | None:
    """How many equal groups of at most `longest` the `rows` make; None if no number up to `MOST_GROUPS` does."""
    return next((groups for groups in range(-(-rows // longest), MOST_GROUPS) if rows % groups == 0), None)
