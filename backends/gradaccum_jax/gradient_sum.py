"""The sum of a window's gradients, in the tree of the parameters, and its arithmetic."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from gradaccum import ArgumentTypeError, ArgumentValueError
from gradaccum.kit import Scalar, Where, explain
from gradaccum_jax.arrays import (
    Array,
    DType,
    Gradients,
    Leaves,
    Params,
    Tree,
    is_key,
    takes_part,
    typeof,
    wider,
)
from gradaccum_jax.sharding import ShardAxes, axes_of, shards_of, vary
from gradaccum_jax.xla import compute_in_one_kernel, run_if


def sum_dtype(leaf: Array, accumulate_dtype: DType) -> DType:
    """Return the dtype in which gradients of `leaf` are summed: float32 for half
    precision, else the leaf's own.

    `accumulate_dtype` replaces both for every leaf that takes part. Complex leaves stay
    complex.
    """
    leaf_dtype = jnp.result_type(leaf)
    if not takes_part(leaf):
        return leaf_dtype
    if leaf_dtype.itemsize < 2:
        raise explain(
            ArgumentTypeError,
            "params",
            expected="parameters of 16 bits or more",
            found=f"dtype {leaf_dtype}",
            fix="Keep parameters in bfloat16 or wider, and cast them to float8 inside"
            " the loss.",
        )
    if accumulate_dtype is None:
        return jnp.dtype("float32") if leaf_dtype.itemsize < 4 else leaf_dtype
    chosen_dtype = jnp.dtype(accumulate_dtype)
    if jax.dtypes.canonicalize_dtype(chosen_dtype) != chosen_dtype:
        raise explain(
            ArgumentValueError,
            "accumulate_dtype",
            expected="a dtype that JAX has switched on",
            found=str(chosen_dtype),
            fix="Set jax.config.update('jax_enable_x64', True) first.",
        )
    if jnp.issubdtype(leaf_dtype, jnp.complexfloating):
        return jnp.promote_types(chosen_dtype, jnp.complex64)
    return chosen_dtype


def zeros(params: Params, accumulate_dtype: DType) -> Tree:
    """Return an empty sum for `params`: one array per leaf; None for random keys, and
    where `params` has None.
    """

    def empty_sum(leaf: Array) -> Array:
        if is_key(leaf):
            return None
        dtype = sum_dtype(leaf, accumulate_dtype)
        return vary(jnp.zeros_like(leaf, dtype=dtype), axes_of(leaf))

    return jax.tree.map(empty_sum, params)


def is_left_out(total: Array, leaf: Array) -> bool:
    """True if the sum has no room for the gradient of `leaf`, a parameter, a gradient
    or an update: the inner optimizer does not read it. Its sum has shape (0,).
    """
    return total.shape == (0,) and np.shape(leaf) != (0,)


def counting(gradients: Gradients, accumulator: Tree) -> Gradients:
    """Return None for the gradients that the sum has no room for."""
    return [
        None if gradient is None or is_left_out(total, gradient) else gradient
        for total, gradient in zip(jax.tree.leaves(accumulator), gradients, strict=True)
    ]


def weight_dtype(accumulator: Tree) -> DType:
    """Return float64 if any leaf is float64 or complex128, else float32."""
    dtypes = [leaf.dtype for leaf in jax.tree.leaves(accumulator)]
    has_float64 = any(dtype in ("float64", "complex128") for dtype in dtypes)
    return jnp.dtype("float64" if has_float64 else "float32")


def add(
    accumulator: Tree,
    gradients: Gradients,
    factor: Scalar,
    adds: Scalar,
    harmless: Scalar = None,
) -> Tree:
    """Add ``factor * gradients`` to the sum if `adds` holds; see `add_weighted`."""

    def add_leaf(total: Array, gradient: Array) -> Array:
        if gradient is None:
            return total
        if factor is not None:
            return add_weighted(total, gradient, factor, adds, harmless)
        return pick(adds, plus(total, gradient), total)

    leaves, structure = jax.tree.flatten(accumulator)
    return jax.tree.unflatten(structure, map(add_leaf, leaves, gradients))


@jax.custom_jvp
def add_weighted(
    total: Array, gradient: Array, weight: Scalar, adds: Scalar, harmless: Scalar
) -> Array:
    """Return ``total + weight * gradient`` in the dtype of `total` if `adds` holds,
    else `total`.

    A weight of 0 must add exactly nothing, even of a NaN, so a select leaves the
    product out. Yet the derivative by the weight is the gradient at weight 0 too, from
    where learning to reweight starts (Ren et al., "Learning to Reweight Examples for
    Robust Deep Learning", 2018, section 3.2). `harmless` holds for such a weight too.
    """
    return pick(adds, plus(total, weight * gradient), total)


@add_weighted.defjvp
def _(primals: tuple[Array, ...], tangents: tuple[Array, ...]) -> tuple[Array, Array]:
    total, gradient, weight, adds, harmless = primals
    total_tangent, gradient_tangent, weight_tangent, *_ = tangents
    # JAX differentiates after `call_jitted` has returned.
    with jax.numpy_dtype_promotion("standard"):
        by_gradient = jnp.where(adds, weight * gradient_tangent, 0)
        by_weight = weight_tangent * jnp.where(harmless, gradient, 0)
        tangent = (total_tangent + by_gradient + by_weight).astype(total.dtype)
        return add_weighted(*primals), tangent


def where_with_derivative_at_zero(harmless: Scalar) -> Where:
    """Return `jax.numpy.where` with the derivative of `add_weighted`: that of the first
    choice where `harmless` holds, else that of the second.
    """
    return lambda adds, a, b: _choose(adds, a, b, harmless)


@jax.custom_jvp
def _choose(adds: Scalar, a: Scalar, b: Scalar, harmless: Scalar) -> Scalar:
    return jnp.where(adds, a, b)


@_choose.defjvp
def _(
    primals: tuple[Scalar, ...], tangents: tuple[Scalar, ...]
) -> tuple[Scalar, Scalar]:
    return _choose(*primals), jnp.where(primals[3], tangents[1], tangents[2])


def all_finite(gradients: Gradients, factor: Scalar) -> Scalar:
    """True if ``factor * gradients`` is finite; a factor of None is 1."""
    flags = [
        jnp.all(jnp.isfinite(gradient if factor is None else factor * gradient))
        for gradient in gradients
        if gradient is not None
    ]
    return compute_in_one_kernel(_all_of(flags))


def divide(accumulator: Tree, divisor: Scalar) -> Tree:
    return jax.tree.map(
        lambda leaf: leaf / divisor if takes_part(leaf) else leaf, accumulator
    )


def keeps_dtypes(accumulator: Tree, divisor: Scalar) -> bool:
    """True if each leaf divided by `divisor` has the leaf's dtype: a half-precision sum
    divided by a float32 is a float32.
    """
    return all(
        leaf.dtype == wider(leaf.dtype, divisor.dtype)
        for leaf in jax.tree.leaves(accumulator)
        if takes_part(leaf)
    )


def emptied(accumulator: Tree, where: Scalar) -> Tree:
    zero_like = make_fill(lambda _: 0)
    return jax.tree.map(lambda leaf: pick(where, zero_like(leaf), leaf), accumulator)


def clear(tree: Tree) -> Tree:
    return jax.tree.map(jnp.zeros_like, tree)


# The global norm of the sum. It is finite if and only if every element is.
#
# Squares of large finite elements overflow, and squares of tiny ones vanish. Only then
# the sum is measured again, times a power of two that brings it into range.


SMALL_SIZE = 2**14
"""Elements of an array at most that is measured together with others of its type."""
GROUP_SIZE = 10
"""XLA compiles a kernel for each sum of squares. So the squares of small arrays of one
type are added up element by element before: a step of 50 arrays, of 64 and of 64 x 64
elements, then compiles in 2.7 s in place of 5.2 s (JAX 0.7.1 on a CPU). Beyond ten, XLA
takes longer to compile a kernel than for two.
"""


class Measured(NamedTuple):
    """The size of a sum."""

    norm: Scalar
    """The global 2-norm; inf if an element is inf or NaN."""
    is_finite: Scalar
    """bool: every element is finite."""


def measure(accumulator: Tree, dtype: DType, shard_axes: ShardAxes = None) -> Measured:
    """Return the norm in `dtype`, over all shards."""
    arrays = [array.astype(dtype) for array in _real_parts(accumulator)]
    norm = _norm(jnp.dtype(dtype), shard_axes, arrays)
    return Measured(norm, norm < jnp.inf)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _norm(dtype: DType, shard_axes: ShardAxes, arrays: Leaves) -> Scalar:
    limits = jnp.finfo(dtype)
    large = 2.0 ** (0.75 * int(limits.maxexp))
    smallest_exact = float(limits.tiny) / float(limits.eps) ** 2

    def measure_again(factor: Scalar) -> Scalar:
        squares = _sum_of_squares(arrays, factor, shard_axes)
        norm = jnp.minimum(jnp.sqrt(squares) / factor, float(limits.max))
        return jnp.where(squares < jnp.inf, norm, jnp.inf)

    squares = _sum_of_squares(arrays, jnp.ones((), dtype), shard_axes)
    in_range = (squares > smallest_exact) & (squares < jnp.inf)
    factor = jnp.where(squares < 1, large, 1 / large)
    return run_if(
        ~in_range, measure_again, jnp.where(in_range, jnp.sqrt(squares), factor)
    )


@_norm.defjvp
def _(
    dtype: DType, shard_axes: ShardAxes, primals: tuple[Leaves], tangents: tuple[Leaves]
) -> tuple[Scalar, Scalar]:
    # The derivative is 0 at 0, and where the norm is not finite: a window of zero
    # gradients has no 0 x inf.
    norm = _norm(dtype, shard_axes, *primals)
    has_derivative = (norm > 0) & (norm < jnp.inf)
    divisor = jnp.where(has_derivative, norm, 1)
    products = []
    for array, tangent in zip(*primals, *tangents, strict=True):
        unit = jnp.where(has_derivative, array / divisor, 0)
        products.append((array, jnp.sum(unit * tangent)))
    return norm, _over_shards(products, dtype, shard_axes)


def _sum_of_squares(arrays: Leaves, factor: Scalar, shard_axes: ShardAxes) -> Scalar:
    """Return the sum of the squares of all elements, each times `factor`."""
    sums: list[tuple[Array, Scalar]] = []
    factors: dict[tuple[str, ...], Scalar] = {}
    for group in _grouped(arrays):
        axes = shards_of(group[0], shard_axes)
        group_factor = factors.get(axes, factor)
        squares = [jnp.square(array * group_factor) for array in group]
        total = jnp.sum(functools.reduce(operator.add, squares))
        sums.append((group[0], total))
        # XLA:CPU before JAX 0.10 writes out squares. The dependence, on a number that
        # is never below 0, makes it measure one group after the other: AdamW on four
        # arrays needs temporary memory of 0.25 times the parameters in place of 1.0
        # (JAX 0.7.1).
        factors[axes] = jnp.where(total < 0, total, factor)
    return _over_shards(sums, factor.dtype, shard_axes)


def _grouped(arrays: Leaves) -> list[Leaves]:
    alike: dict[Any, Leaves] = {}
    for place, array in enumerate(arrays):
        kind = typeof(array) if array.size <= SMALL_SIZE else place
        alike.setdefault(kind, []).append(array)
    return [
        group[start : start + GROUP_SIZE]
        for group in alike.values()
        for start in range(0, len(group), GROUP_SIZE)
    ]


def _over_shards(
    sums: list[tuple[Array, Scalar]], dtype: DType, shard_axes: ShardAxes
) -> Scalar:
    """Return the total of one number for each array over all shards; that of an array
    of which each device has a copy counts once.
    """
    sums_by_axes: dict[tuple[str, ...], list[Scalar]] = {}
    for array, number in sums:
        sums_by_axes.setdefault(shards_of(array, shard_axes), []).append(number)
    total = jnp.zeros((), dtype)
    for axes, numbers in sums_by_axes.items():
        group_total = jnp.stack(numbers).sum()
        total = total + (lax.psum(group_total, axes) if axes else group_total)  # type: ignore[no-untyped-call]
    return total


def _real_parts(accumulator: Tree) -> Leaves:
    parts: Leaves = []
    for leaf in jax.tree.leaves(accumulator):
        if leaf.size and jnp.iscomplexobj(leaf):
            parts += [leaf.real, leaf.imag]
        elif leaf.size:
            parts.append(leaf)
    return parts


def _largest(leaf: Array) -> Scalar:
    """Return the largest magnitude of a real array in float32 or wider; NaN if an
    element is.

    Row by row: XLA:CPU takes minutes to compile several reductions of whole matrices to
    scalars side by side.
    """
    rows = jnp.atleast_1d(leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32)))
    return jnp.max(jnp.maximum(jnp.max(rows, axis=-1), -jnp.min(rows, axis=-1)))


def fits(accumulator: Tree, divisor: Scalar, dtypes: list[DType]) -> Scalar:
    """True if every finite element of the sum stays finite in
    ``(sum / divisor).astype(dtype)``: a bool scalar.

    The largest magnitude decides, because dividing and rounding are monotonic.
    """
    flags = []
    for leaf, dtype in zip(jax.tree.leaves(accumulator), dtypes, strict=True):
        if leaf.size and _is_narrower(dtype, leaf.dtype):
            largest = jnp.stack([_largest(part) for part in _real_parts(leaf)]).max()
            flags.append(largest / divisor < _limit(dtype))
    return compute_in_one_kernel(_all_of(flags))


def _is_narrower(dtype: DType, total_dtype: DType) -> bool:
    """True if `dtype` is narrower than the quotient: a division by a float32 makes
    float32 even of a half-precision sum.
    """
    if not jnp.issubdtype(total_dtype, jnp.inexact):
        return False
    quotient_dtype = wider(total_dtype, jnp.float32)
    return bool(jnp.finfo(dtype).maxexp < jnp.finfo(quotient_dtype).maxexp)


def _limit(dtype: DType) -> float:
    """Return the smallest magnitude that rounds to infinity, half a step beyond the
    largest number: 65520 for float16.
    """
    largest = float(jnp.finfo(dtype).max)
    return largest + 2.0 ** (math.frexp(largest)[1] - int(jnp.finfo(dtype).nmant) - 2)


def _all_of(flags: list[Scalar]) -> Scalar:
    return functools.reduce(jnp.logical_and, flags, jnp.asarray(True))


# Elementwise operations on every array of a model, in as few equations of the traced
# program as there are.
#
# `jax.numpy` promotes, broadcasts and jits: `jnp.where` alone is a function of its own
# in the program, called once for each array. For arrays of one shape and dtype
# `jax.lax` says the same in one equation each. Elsewhere `jax.numpy` does it.


def plus(a: Array, b: Array) -> Array:
    """Return ``(a + b)`` in the dtype of `a`, of its shape."""
    if a.dtype == b.dtype and a.shape == b.shape:
        return lax.add(a, b)
    return to(a + b, a.dtype)


def make_fill(value: Callable[[Array], Scalar]) -> Callable[[Array], Array]:
    """Return a function that fills an array with ``value(array)``, made once for each
    type.
    """
    filled_arrays: dict[Any, Array] = {}

    def fill(leaf: Array) -> Array:
        array_type = typeof(leaf)
        if array_type not in filled_arrays:
            filled_arrays[array_type] = lax.full_like(leaf, value(leaf))
        return filled_arrays[array_type]

    return fill


def pick(where: Scalar, a: Array, b: Array) -> Array:
    return lax.select(jnp.asarray(where), a, b)


def to(leaf: Array, dtype: DType) -> Array:
    return leaf if leaf.dtype == dtype else leaf.astype(dtype)
