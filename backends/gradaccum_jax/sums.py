"""The sum of a window and its arithmetic: zeros, add, divide, clear, the norm, and whether a quotient fits the parameter's dtype.

The accumulator has the structure of the parameters. Gradients come as a list aligned with its leaves (`checks.align`), None for a
parameter that took no part. Additions are plain elementwise expressions, so that XLA fuses them into one pass in place.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from gradaccum import ArgumentValueError
from gradaccum.kit import Scalar, Where, explain
from gradaccum_jax.arrays import Array, DType, Gradients, Leaves, Params, Tree, is_key, standard, takes_part, typeof, wider
from gradaccum_jax.control_flow import once
from gradaccum_jax.sharding import ShardAxes, axes_of, explicitly_sharded, partitioned, shards_of, vary


def sum_dtype(leaf: Array, accumulate_dtype: DType) -> DType:
    """The dtype in which gradients of `leaf` are summed.

    It is float32 for half precision and below, the leaf's own otherwise. If `accumulate_dtype` is given, it replaces both for every leaf
    that takes part. Complex leaves stay complex.
    """
    own = jnp.result_type(leaf)
    if not takes_part(leaf):
        return own
    if accumulate_dtype is None:
        return jnp.dtype("float32") if own.itemsize < 4 else own
    wanted = jnp.dtype(accumulate_dtype)
    if jax.dtypes.canonicalize_dtype(wanted) != wanted:
        fix = "Set jax.config.update('jax_enable_x64', True) first."
        raise explain(ArgumentValueError, "accumulate_dtype", expected="a dtype that JAX has switched on", found=str(wanted), fix=fix)
    return jnp.promote_types(wanted, jnp.complex64) if jnp.issubdtype(own, jnp.complexfloating) else wanted


def zeros(params: Params, accumulate_dtype: DType) -> Tree:
    """An empty accumulator for `params`: exact zeros, one array per leaf; None for random keys, and where `params` has None."""

    def empty(leaf: Array) -> Array:
        return None if is_key(leaf) else vary(jnp.zeros_like(leaf, dtype=sum_dtype(leaf, accumulate_dtype)), axes_of(leaf))

    return jax.tree.map(empty, params)


def weight_dtype(accumulator: Tree) -> DType:
    """float64 if any leaf is float64 or complex128, else float32."""
    wide = any(leaf.dtype in ("float64", "complex128") for leaf in jax.tree.leaves(accumulator))
    return jnp.dtype("float64" if wide else "float32")


def add(accumulator: Tree, gradients: Gradients, factor: Scalar, adds: Scalar, harmless: Scalar = None) -> Tree:
    """``accumulator + factor * gradients`` where `adds` holds, else `accumulator`; by select, because 0 x NaN is NaN."""

    def add_leaf(held: Array, gradient: Array) -> Array:
        if gradient is None:
            return held
        gradient = standard(gradient)
        if factor is not None:
            return add_weighted(held, gradient, factor, adds, harmless)
        return pick(adds, plus(held, gradient), held)

    leaves, structure = jax.tree.flatten(accumulator)
    return jax.tree.unflatten(structure, [add_leaf(held, gradient) for held, gradient in zip(leaves, gradients, strict=True)])


@jax.custom_jvp
def add_weighted(held: Array, gradient: Array, weight: Scalar, adds: Scalar, harmless: Scalar) -> Array:
    """``held + weight * gradient`` in the dtype of `held` where `adds` holds, else `held`.

    It has a derivative by the weight at weight 0 too. A weight of 0 must add exactly nothing, even of a NaN, so a select leaves the product
    out, and JAX's derivative of that select is 0. But the derivative of w g by w is g at every w, and learning to reweight starts from
    weights of 0 (Ren et al., "Learning to Reweight Examples for Robust Deep Learning", 2018, section 3.2).
    """
    return pick(adds, plus(held, weight * gradient), held)


@add_weighted.defjvp
def _(primals: tuple[Array, ...], tangents: tuple[Array, ...]) -> tuple[Array, Array]:
    held, gradient, weight, adds, harmless = primals
    moved, turned, heavier, *_ = tangents
    with jax.numpy_dtype_promotion("standard"):  # JAX differentiates after `call_jitted` has returned.
        by_gradient = jnp.where(adds, weight * turned, 0)
        by_weight = heavier * jnp.where(harmless, gradient, 0)
        return add_weighted(*primals), (moved + by_gradient + by_weight).astype(held.dtype)


def passing(harmless: Scalar) -> Where:
    """`jax.numpy.where` with the derivative of `add_weighted`: that of the first choice where `harmless` holds, else that of the second."""
    return lambda adds, a, b: _chosen(adds, a, b, harmless)


@jax.custom_jvp
def _chosen(adds: Scalar, a: Scalar, b: Scalar, harmless: Scalar) -> Scalar:
    return jnp.where(adds, a, b)


@_chosen.defjvp
def _(primals: tuple[Scalar, ...], tangents: tuple[Scalar, ...]) -> tuple[Scalar, Scalar]:
    return _chosen(*primals), jnp.where(primals[3], tangents[1], tangents[2])


def all_finite(gradients: Gradients) -> Scalar:
    """True if every element of every gradient is finite: a bool scalar."""
    return all_of([jnp.all(jnp.isfinite(gradient)) for gradient in gradients if gradient is not None])


def divide(accumulator: Tree, divisor: Scalar, dtypes: list[DType]) -> Tree:
    """``accumulator / divisor`` in `dtypes`, one per leaf: the gradient for the inner optimizer."""
    leaves, structure = jax.tree.flatten(accumulator)
    return jax.tree.unflatten(structure, [to(leaf / divisor, dtype) for leaf, dtype in zip(leaves, dtypes, strict=True)])


def emptied(accumulator: Tree, where: Scalar) -> Tree:
    zeros = fills(lambda _: 0)
    return jax.tree.map(lambda leaf: pick(where, zeros(leaf), leaf), accumulator)


def clear(tree: Tree) -> Tree:
    """Exact zeros of the same shapes and dtypes."""
    return jax.tree.map(jnp.zeros_like, tree)


def fits(accumulator: Tree, divisor: Scalar, dtypes: list[DType]) -> Scalar:
    """True if every finite element of the accumulator stays finite in ``(accumulator / divisor).astype(dtype)``: a bool scalar.

    A finite float32 sum may be more than float16 can hold. Only leaves whose dtype has a smaller range than their sum's are looked at, and
    only the largest magnitude of each: dividing and rounding are monotonic. So this costs nothing for float32, bfloat16 and float64
    parameters, and with float32 masters.
    """
    held = zip(jax.tree.leaves(accumulator), dtypes, strict=True)
    return all_of([_largest(leaf) / divisor < _limit(dtype) for leaf, dtype in held if leaf.size and _is_narrower(dtype, leaf.dtype)])


def _is_narrower(dtype: DType, held: DType) -> bool:
    """A division by a float32 makes float32 even of a half-precision sum."""
    if not jnp.issubdtype(held, jnp.inexact):
        return False
    quotient = wider(held, jnp.float32)
    return bool(jnp.finfo(dtype).maxexp < jnp.finfo(quotient).maxexp)


def _limit(dtype: DType) -> float:
    """The smallest magnitude that rounds to infinity: half a step beyond the largest number. 65520 for float16."""
    largest = float(jnp.finfo(dtype).max)
    return largest + 2.0 ** (math.frexp(largest)[1] - int(jnp.finfo(dtype).nmant) - 2)


def _largest(leaf: Array) -> Scalar:
    """Row by row: XLA:CPU takes minutes to compile several reductions of whole matrices to scalars side by side."""
    parts = (leaf.real, leaf.imag) if jnp.iscomplexobj(leaf) else (leaf,)
    rows = [jnp.atleast_1d(part.astype(jnp.promote_types(part.dtype, jnp.float32))) for part in parts]
    return jnp.stack([jnp.max(jnp.maximum(jnp.max(part, axis=-1), -jnp.min(part, axis=-1))) for part in rows]).max()


# Elementwise operations on every array of a model, in as few equations of the traced program as there are.
#
# `jax.numpy` promotes, broadcasts and jits: `jnp.where` alone is a function of its own in the program, called once for each array. For
# arrays of one shape and dtype `jax.lax` says the same in one equation each. Elsewhere `jax.numpy` does it.


def plus(a: Array, b: Array) -> Array:
    """``(a + b)`` in the dtype of `a`, of its shape."""
    return lax.add(a, b) if _like(a, b) else to(a + b, a.dtype)


def fills(value: Callable[[Array], Scalar]) -> Callable[[Array], Array]:
    """A function of an array that gives one filled with ``value(array)``, of its type; one for all arrays of a type."""
    made: dict[Any, Array] = {}

    def fill(leaf: Array) -> Array:
        kind = typeof(leaf)
        if kind not in made:
            made[kind] = lax.full_like(leaf, value(leaf))
        return made[kind]

    return fill


def pick(where: Scalar, a: Array, b: Array) -> Array:
    """`a` where the scalar holds, else `b`, of one shape and dtype."""
    return lax.select(jnp.asarray(where), a, b)


def to(leaf: Array, dtype: DType) -> Array:
    return leaf if leaf.dtype == dtype else leaf.astype(dtype)


def _like(a: Array, b: Array) -> bool:
    return bool(a.dtype == b.dtype and a.shape == b.shape)


# Folds of many scalars, one from each tensor, into one that XLA computes once.
#
# XLA copies a chain of scalar additions or conjunctions into the fusion of every tensor that uses its end: n tensors, n chains of n links,
# and a program whose size is the square of the model's. A barrier does not stop it, and XLA turns a reduction of the stacked scalars into a
# chain again. It leaves alone a reduction with two results that need each other. Both folds here are such reductions.


Pair = tuple[Array, Array]
"""A sum, and the rounding error that it has lost."""


def all_of(flags: list[Scalar]) -> Scalar:
    """True if all of these bool scalars hold: `argmin` of (all, False) is 1 only where the first is True."""
    every = functools.reduce(jnp.logical_and, flags, jnp.asarray(True))
    return jnp.argmin(jnp.stack([every, jnp.asarray(False)])) == 1


@jax.custom_jvp
def sum_of(values: Array) -> Array:
    """The sum along the first axis, compensated (Neumaier, 1974): as good as rounded once; inf or NaN where an element is."""
    nothing = jnp.zeros((), values.dtype)
    total, lost = lax.reduce((values, jnp.zeros_like(values)), (nothing, nothing), _add, (0,))
    return jnp.where(jnp.isfinite(total), total + lost, total)


@sum_of.defjvp
def _(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Scalar, Scalar]:
    return sum_of(*primals), jnp.sum(*tangents, axis=0)


def _add(a: Pair, b: Pair) -> Pair:
    """The sum of two pairs; the rounding error of an addition is exact in floating point (Knuth, TAOCP 2, 4.2.2)."""
    total = a[0] + b[0]
    other = total - a[0]
    return total, a[1] + b[1] + ((a[0] - (total - other)) + (b[0] - other))


# The global norm of an accumulator, robust and with no temporary of the parameters' size.
#
# Squares of large finite elements overflow, and squares of tiny ones vanish. Then the norm is that of the elements times a power of two
# that brings them into range. So a norm that is not finite means a gradient that is not finite. Large arrays are measured again for it,
# only then.
#
# XLA compiles a kernel for each sum of squares. Small arrays of one shape are squared and added up element by element, times each power,
# and only the result is summed: one kernel for many arrays. XLA may have sharded arrays of one shape differently; so large ones are summed
# each by itself.
#
# XLA sums squares in one pass with no temporary, but on the CPU only since JAX 0.10. Before, it writes out the squares. There the sum of
# squares of a large array is the diagonal of the product of a matrix of 16 columns with itself: a library call, and no element waits for
# the one before it. A program that XLA partitions, or one for another device, has no use for that.


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
    """Global 2-norm and whether every element is finite: scalars of `dtype` and bool."""
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
