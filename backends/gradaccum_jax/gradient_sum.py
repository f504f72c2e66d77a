"""Arithmetic on the accumulator: a tree that has the same structure as the parameters
and contains the sums of a window's gradients.
"""

from __future__ import annotations

import functools
import math
import operator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from gradaccum.kit import Scalar
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
from gradaccum_jax.xla import run_if


def sum_dtype(leaf: Array, accumulate_dtype: DType) -> DType:
    """Return the dtype in which gradients of `leaf` are summed: float32 for half
    precision, otherwise the leaf's own dtype.

    If `accumulate_dtype` is not None, it is used for every floating-point leaf instead.
    The gradients of a complex leaf are always summed in a complex dtype.
    """
    leaf_dtype = jnp.result_type(leaf)
    if not takes_part(leaf):
        return leaf_dtype
    if accumulate_dtype is None:
        # Compare the dtypes' sizes, because JAX does not promote dtypes below 16 bits.
        return jnp.dtype("float32") if leaf_dtype.itemsize < 4 else leaf_dtype
    chosen_dtype = jnp.dtype(accumulate_dtype)
    if jnp.issubdtype(leaf_dtype, jnp.complexfloating):
        return jnp.promote_types(chosen_dtype, jnp.complex64)
    return chosen_dtype


def zeros(params: Params, accumulate_dtype: DType) -> Tree:
    """Return an accumulator of zeros for `params`. An entry is None if the
    corresponding entry of `params` is None or a random key.
    """

    def empty_sum(leaf: Array) -> Array:
        if is_key(leaf):
            return None
        dtype = sum_dtype(leaf, accumulate_dtype)
        return vary(jnp.zeros_like(leaf, dtype=dtype), axes_of(leaf))

    return jax.tree.map(empty_sum, params)


# The gradients of a frozen parameter are not added up. Instead of their sum, the
# accumulator contains an empty array of shape (0, 0, *parameter.shape). `has_sum`
# recognizes this shape, which no parameter of an ordinary model has.


def without_sum(total: Array) -> Array:
    return jnp.zeros((0, 0, *total.shape), total.dtype)


def has_sum(total: Array) -> bool:
    return bool(total.shape[:2] != (0, 0))


def as_gradient(total: Array) -> Array:
    """Return `total`, or zeros of the parameter's shape if `total` is the placeholder
    for a frozen parameter.
    """
    return total if has_sum(total) else jnp.zeros(total.shape[2:], total.dtype)


def weight_dtype(tree: Tree) -> DType:
    """Return the dtype for weights and losses: float64 if any leaf of `tree` is float64
    or complex128, else float32.
    """
    dtypes = [jnp.result_type(leaf) for leaf in jax.tree.leaves(tree)]
    if any(dtype in ("float64", "complex128") for dtype in dtypes):
        return jnp.dtype("float64")
    return jnp.dtype("float32")


def add(accumulator: Tree, gradients: Gradients, factor: Scalar, adds: Scalar) -> Tree:
    """Add ``factor * gradients`` to the accumulator if `adds` is true. ``factor=None``
    means 1.

    If `adds` is false, for example because the weight is 0, the sum must not change
    even if the gradient is NaN. So a select chooses between the old sum and the new
    sum. Adding 0 times the gradient would not work, because 0 times NaN is NaN.
    """

    def add_leaf(total: Array, gradient: Array) -> Array:
        if gradient is None:
            return total
        if factor is not None:
            gradient = factor * gradient
        return select(adds, (total + gradient).astype(total.dtype), total)

    leaves, structure = jax.tree.flatten(accumulator)
    return jax.tree.unflatten(structure, map(add_leaf, leaves, gradients))


def all_finite(gradients: Gradients, factor: Scalar) -> Scalar:
    """Return a bool scalar: True if every element of ``factor * gradients`` is finite.
    ``factor=None`` means 1.
    """
    is_finite = jnp.asarray(True)
    for gradient in gradients:
        if gradient is None:
            continue
        if factor is not None:
            gradient = factor * gradient
        is_finite = is_finite & jnp.all(jnp.isfinite(gradient))
    return is_finite


def divide(accumulator: Tree, divisor: Scalar) -> Tree:
    return jax.tree.map(
        lambda leaf: leaf / divisor if takes_part(leaf) else leaf, accumulator
    )


def keeps_dtypes(accumulator: Tree, divisor: Scalar) -> bool:
    """True if dividing the accumulator by `divisor` does not change the dtype of any
    leaf. A half-precision sum divided by a float32 would become float32.
    """
    return all(
        leaf.dtype == wider(leaf.dtype, divisor.dtype)
        for leaf in jax.tree.leaves(accumulator)
        if takes_part(leaf)
    )


def is_small(accumulator: Tree) -> bool:
    """True if no array has more than `SMALL_SIZE` elements."""
    return not any(map(_is_large, jax.tree.leaves(accumulator)))


def _is_large(array: Array) -> bool:
    return bool(array.size > SMALL_SIZE)


def emptied(accumulator: Tree, where: Scalar) -> Tree:
    return jax.tree.map(
        lambda leaf: select(where, lax.full_like(leaf, 0), leaf), accumulator
    )


def clear(tree: Tree) -> Tree:
    return jax.tree.map(jnp.zeros_like, tree)


def select(predicate: Scalar, a: Array, b: Array) -> Array:
    """Return `a` if `predicate` is true, else `b`. `a` and `b` must have the same type.

    `jnp.where` is not used, because it would add a separate function to the compiled
    program and call it once for each array.
    """
    return lax.select(jnp.asarray(predicate), a, b)


# The global norm of the gradient sum is finite if and only if every element is finite.
#
# But the squares of large finite elements may overflow, and the squares of tiny
# elements may underflow. In both cases the elements are multiplied by a power of two
# that brings the squares into range, and the norm is computed again.


SMALL_SIZE = 2**14
"""Arrays with at most this many elements share one sum-of-squares kernel with other
arrays of the same type (see `GROUP_SIZE`).
"""
GROUP_SIZE = 10
"""The maximum number of small arrays that share one sum-of-squares kernel. XLA compiles
a kernel for each sum of squares, so the squares of small arrays of the same type are
first added up element by element. A step with 150 arrays of 64 or 64 x 64 elements then
compiles in 1.5 s instead of 12.8 s (JAX 0.7.1 on a CPU). For more than ten arrays, two
smaller kernels compile faster than a single kernel.
"""


def measure(accumulator: Tree, dtype: DType, shard_axes: ShardAxes = None) -> Scalar:
    """Compute the global 2-norm of the gradient sum in `dtype`, over all shards of the
    model. The norm is inf if an element is inf or NaN.
    """
    arrays = [array.astype(dtype) for array in _real_parts(accumulator)]
    limits = jnp.finfo(dtype)
    large = 2.0 ** (0.75 * int(limits.maxexp))
    smallest_exact = float(limits.tiny) / float(limits.eps) ** 2
    squares = _sum_of_squares(arrays, jnp.ones((), dtype), shard_axes)
    in_range = (squares > smallest_exact) & (squares < jnp.inf)

    def measure_again(factor: Scalar) -> Scalar:
        again = _sum_of_squares(arrays, factor, shard_axes)
        norm = jnp.minimum(_square_root(again) / factor, float(limits.max))
        return jnp.where(again < jnp.inf, norm, jnp.inf)

    factor = jnp.where(squares < jnp.inf, large, 1 / large)
    norm_or_factor = jnp.where(in_range, _square_root(squares), factor)
    return run_if(~in_range, measure_again, norm_or_factor)


def _square_root(squares: Scalar) -> Scalar:
    """Return the square root of `squares`, with derivative 0 at 0. With `jnp.sqrt`, the
    derivative of the norm would be 0 x inf, which is NaN, whenever all gradients are 0.
    """
    is_zero = squares == 0
    return jnp.where(is_zero, 0, jnp.sqrt(jnp.where(is_zero, 1, squares)))


def _sum_of_squares(arrays: Leaves, factor: Scalar, shard_axes: ShardAxes) -> Scalar:
    """Multiply all elements by `factor`, and return the sum of their squares over all
    shards of the model. An array that is replicated on several devices is counted once.
    """
    sums: dict[tuple[str, ...], Scalar] = {}
    for group in _groups_of_one_type(arrays):
        axes = shards_of(group[0], shard_axes)
        total = sums.get(axes, jnp.zeros_like(factor))
        group_factor = factor
        if _is_large(group[0]):
            # Before JAX 0.10, XLA:CPU writes the squares to memory. With this
            # `jnp.where`, an array's squares depend on the previous `total`, so XLA
            # processes one array after another. AdamW on four arrays then needs
            # temporary memory of 0.25 times the size of the parameters instead of 1.0
            # times (JAX 0.7.1). The `jnp.where` always returns `factor`, because
            # `total` is never negative. Small arrays do not need the `jnp.where`.
            # Without it, their kernels are identical, and XLA compiles identical
            # kernels in less than half the time (JAX 0.7.1).
            group_factor = jnp.where(total < 0, total, factor)
        squares = [jnp.square(array * group_factor) for array in group]
        sums[axes] = total + jnp.sum(functools.reduce(operator.add, squares))
    for axes, total in sums.items():
        if axes:
            sums[axes] = lax.psum(total, axes)  # type: ignore[no-untyped-call]
    return sum(sums.values(), start=jnp.zeros_like(factor))


def _groups_of_one_type(arrays: Leaves) -> list[Leaves]:
    """Group small arrays of the same type into lists of at most `GROUP_SIZE`. Each
    large array gets a list of its own.
    """
    by_type: dict[Any, Leaves] = {}
    for place, array in enumerate(arrays):
        kind = place if _is_large(array) else typeof(array)
        by_type.setdefault(kind, []).append(array)
    return [
        same_type[start : start + GROUP_SIZE]
        for same_type in by_type.values()
        for start in range(0, len(same_type), GROUP_SIZE)
    ]


def _real_parts(accumulator: Tree) -> Leaves:
    parts: Leaves = []
    for leaf in jax.tree.leaves(accumulator):
        if leaf.size:
            is_complex = jnp.iscomplexobj(leaf)
            parts += [leaf.real, leaf.imag] if is_complex else [leaf]
    return parts


def fits(accumulator: Tree, divisor: Scalar, dtypes: list[DType]) -> Scalar:
    """Return a bool scalar: True if every finite element of the accumulator is still
    finite after ``(sum / divisor).astype(dtype)``, where `dtype` is the leaf's entry in
    `dtypes`.

    It is enough to check the largest magnitude of each leaf, because division and
    rounding are monotonic.
    """
    all_fit = jnp.asarray(True)
    for leaf, dtype in zip(jax.tree.leaves(accumulator), dtypes, strict=True):
        if _is_narrower(dtype, leaf.dtype):
            for part in _real_parts(leaf):
                all_fit = all_fit & (_largest(part) / divisor < _limit(dtype))
    return all_fit


def _is_narrower(dtype: DType, total_dtype: DType) -> bool:
    """True if a gradient sum of dtype `total_dtype`, divided by a float32 number, may
    be too large for `dtype`. Dividing a half-precision sum gives a float32 quotient, so
    `dtype` is compared with the dtype of the quotient.
    """
    if not jnp.issubdtype(total_dtype, jnp.inexact):
        return False
    quotient_dtype = wider(total_dtype, jnp.float32)
    return bool(jnp.finfo(dtype).maxexp < jnp.finfo(quotient_dtype).maxexp)


def _largest(leaf: Array) -> Scalar:
    """Return the largest magnitude in a real array, in float32 or a wider dtype. It is
    NaN if an element is NaN.

    The array is reduced row by row, because XLA:CPU takes minutes to compile a program
    in which several whole matrices are reduced to scalars.
    """
    rows = jnp.atleast_1d(leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32)))
    return jnp.max(jnp.maximum(jnp.max(rows, axis=-1), -jnp.min(rows, axis=-1)))


def _limit(dtype: DType) -> float:
    """Return the smallest magnitude that is rounded to infinity in `dtype`. It lies
    half a rounding step above the largest finite number: for float16 it is 65520.
    """
    largest = float(jnp.finfo(dtype).max)
    return largest + 2.0 ** (math.frexp(largest)[1] - int(jnp.finfo(dtype).nmant) - 2)
