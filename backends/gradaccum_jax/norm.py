"""The global norm of an accumulator, robust and with no temporary of the parameters' size.

Squares of large finite elements overflow, and squares of tiny ones vanish. Then, and only then, the norm is measured again on the elements
times a power of two that brings them into range. So a norm that is not finite means a gradient that is not finite.

XLA compiles a kernel for each sum of squares. Small arrays of one shape are squared and added up element by element, and only the result is
summed: one kernel for many arrays. XLA may have sharded arrays of one shape differently; so large ones are summed each by itself.

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
from gradaccum_jax.workers.shard_axes import ShardAxes, shards_of

WRITES_SQUARES = jax.__version_info__ < (0, 10)
SMALL = 2**14
"""Elements of an array at most that is measured together with others: 64 KiB, if devices have to exchange one."""
MOST_TOGETHER = 64
COLUMNS = 16
"""With fewer columns additions wait for one another; more cost arithmetic. 4, 6, 10 and 5 GB/s at 1, 4, 16 and 32, on one core."""
LONGEST_COLUMN, LONGEST_ALONE = 2**16, 2**10
"""A column adds up in order. Beyond the first length its rounding errors would show: 1e-6 of the sum here. The second length is for fewer
than four columns, which the library adds up one by one: 1e-5."""
MOST_GROUPS = 2**12
Groups = list[tuple[tuple[str, ...], Leaves]]
"""Arrays that are measured together, and the mesh axes along which they are sharded inside `jax.shard_map`."""


def measure(accumulator: Tree, dtype: DType, shard_axes: ShardAxes = None) -> tuple[Scalar, Scalar]:
    """Global 2-norm and whether every element is finite: scalars of `dtype` and bool.

    Args:
        accumulator: the tree of sums.
        dtype: float32 or float64. A norm of finite elements beyond its range is reported as its largest number.
        shard_axes: the mesh axes along which arrays are sharded inside `jax.shard_map`: the norm is that of all shards.
    """
    groups = _grouped(_real_leaves(accumulator, dtype), shard_axes)
    squares = _total(groups, [square_sum(leaves) for _, leaves in groups], dtype)
    plain = (squares > _smallest_sum(dtype)) & (squares < jnp.inf)
    return once(~plain, lambda _: _scaled(groups, squares), (_root(squares), plain))


def _grouped(leaves: Leaves, shard_axes: ShardAxes) -> Groups:
    groups: dict[Any, Leaves] = {}
    for place, leaf in enumerate(leaves):
        groups.setdefault(typeof(leaf) if _together(leaf) else place, []).append(leaf)
    parts = [together[start : start + MOST_TOGETHER] for together in groups.values() for start in range(0, len(together), MOST_TOGETHER)]
    return [(shards_of(part[0], shard_axes), part) for part in parts]


def _together(leaf: Array) -> bool:
    return bool(leaf.size <= SMALL)


def _scaled(groups: Groups, squares: Scalar) -> tuple[Scalar, Scalar]:
    """The norm of arrays whose sum of `squares` is out of range. Times the smaller power, it is finite unless an element is not."""
    power = 0.75 * int(jnp.finfo(squares.dtype).maxexp)
    first = scale = jnp.where(squares < 1, 2.0**power, 2.0**-power).astype(squares.dtype)
    sums, so_far = [], jnp.zeros_like(squares)
    for axes, leaves in groups:
        sums.append(square_sum([leaf * scale for leaf in leaves]))
        if WRITES_SQUARES and not axes and not _together(leaves[0]):
            # Never below 0. The dependence makes XLA scale one large array at a time, so only one temporary lives.
            so_far = so_far + sums[-1]
            scale = jnp.where(so_far < 0, so_far, scale)
    total = _total(groups, sums, squares.dtype)
    finite = total < jnp.inf
    norm = jnp.minimum(_root(total) / first, float(np.finfo(squares.dtype).max))
    return jnp.where(finite, norm, jnp.inf), finite


def _root(total: Scalar) -> Scalar:
    """The square root, with derivative 0 at 0: a window of zero gradients has derivative 0, not 0 x inf."""
    positive = total > 0
    return jnp.where(positive, jnp.sqrt(jnp.where(positive, total, 1)), total)


def _total(groups: Groups, sums: list[Scalar], dtype: DType) -> Scalar:
    """The sum of the groups' sums of squares: of those that are sharded, the devices' sums are added up; a copy counts once."""
    alike: dict[tuple[str, ...], list[Scalar]] = {}
    for (axes, _), one in zip(groups, sums, strict=True):
        alike.setdefault(axes, []).append(one)
    if not any(alike):
        return _folded(sums, dtype)
    return _folded([lax.psum(_folded(ones, dtype), axes) if axes else _folded(ones, dtype) for axes, ones in alike.items()], dtype)  # type: ignore[no-untyped-call]


def _folded(sums: list[Scalar], dtype: DType) -> Scalar:
    """Where XLA writes squares, stacked sums would each be a kernel of its own. There the sums are chained, and only the end is folded."""
    if WRITES_SQUARES or not sums:
        return sum_of(jnp.stack([sum(sums, jnp.zeros((), dtype)), jnp.zeros((), dtype)]))
    return sum_of(jnp.stack(sums))


def _smallest_sum(dtype: DType) -> float:
    """Below this sum, the squares that vanished may count; 1e-24 in float32."""
    kind = np.finfo(dtype)
    return float(kind.tiny) / float(kind.eps) ** 2


def _real_leaves(accumulator: Tree, dtype: DType) -> Leaves:
    leaves = [leaf for leaf in jax.tree.leaves(accumulator) if leaf.size]
    parts = [(leaf.real, leaf.imag) if jnp.iscomplexobj(leaf) else (leaf,) for leaf in leaves]
    return [part.astype(dtype) for pair in parts for part in pair]


def square_sum(leaves: Leaves) -> Scalar:
    """The sum of squares of real floating arrays of one shape: a scalar of their dtype."""
    if not WRITES_SQUARES or _together(leaves[0]) or explicitly_sharded(leaves[0]):
        return jnp.sum(functools.reduce(operator.add, [leaf * leaf for leaf in leaves]))

    def on_cpu(leaf: Array) -> Scalar:
        return lax.cond(partitioned(), _plain, _by_product, leaf)

    return lax.platform_dependent(*leaves, cpu=on_cpu, default=_plain)


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
