"""The sum of a window and its arithmetic: zeros, add, divide, clear, and whether a quotient fits the parameter's dtype.

The accumulator has the structure of the parameters. Gradients come as a list aligned with its leaves (`alignment.align`), None for a
parameter that took no part. Additions are plain elementwise expressions, so that XLA fuses them into one pass in place.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from gradaccum import ArgumentValueError
from gradaccum.kit import Scalar, Where, explain
from gradaccum_jax.dtypes import is_key, standard, takes_part, wider
from gradaccum_jax.elementwise import fills, pick, plus, to
from gradaccum_jax.folds import all_of
from gradaccum_jax.types import Array, DType, Gradients, Params, Tree
from gradaccum_jax.unreduced import alike, axes_waiting, factor_of, zeros_for, zeros_like
from gradaccum_jax.varying import axes_of, vary


def sum_dtype(leaf: Array, accumulate_dtype: DType) -> DType:
    """The dtype in which gradients of `leaf` are summed.

    It is float32 for half precision and below, the leaf's own otherwise. If `accumulate_dtype` is given, it replaces both for every leaf
    that takes part. Complex leaves stay complex.

    Raises:
        ArgumentValueError: float64 was asked for and JAX has it switched off.
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
        return None if is_key(leaf) else vary(zeros_for(leaf, sum_dtype(leaf, accumulate_dtype)), axes_of(leaf))

    return jax.tree.map(empty, params)


def weight_dtype(accumulator: Tree) -> DType:
    """float64 if any leaf is float64 or complex128, else float32."""
    wide = any(leaf.dtype in ("float64", "complex128") for leaf in jax.tree.leaves(accumulator))
    return jnp.dtype("float64" if wide else "float32")


def add(accumulator: Tree, gradients: Gradients, factor: Scalar, adds: Scalar, harmless: Scalar = None) -> Tree:
    """``accumulator + factor * gradients`` where `adds` holds, else `accumulator`; by select, because 0 x NaN is NaN.

    Args:
        accumulator: the tree of sums.
        gradients: aligned with its leaves; None adds nothing.
        factor: a scalar; None: 1, without a multiplication.
        adds: bool scalar.
        harmless: bool scalar, with a factor only; see `add_weighted`.
    """

    def add_leaf(held: Array, gradient: Array) -> Array:
        if gradient is None:
            return held
        held, gradient = alike(held, standard(gradient))
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

    Args:
        held: the sum, any shape.
        gradient: of the same shape.
        weight: a scalar.
        adds: bool scalar: the product is added.
        harmless: bool scalar: the product is added, or the weight is 0. Where it is False, the derivative by the weight is 0.
    """
    return pick(adds, plus(held, factor_of(weight, gradient) * gradient), held)


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
    """Whether every element of every gradient is finite: a bool scalar."""
    return all_of([jnp.all(jnp.isfinite(gradient)) for gradient in gradients if gradient is not None])


def divide(accumulator: Tree, divisor: Scalar, dtypes: list[DType]) -> Tree:
    """``accumulator / divisor`` in `dtypes`, one per leaf: the gradient for the inner optimizer."""
    leaves, structure = jax.tree.flatten(accumulator)
    return jax.tree.unflatten(structure, [to(leaf / divisor, dtype) for leaf, dtype in zip(leaves, dtypes, strict=True)])


def emptied(accumulator: Tree, where: Scalar) -> Tree:
    """Zeros where the bool scalar holds, else `accumulator`; sums in parts as they are, see `unreduced.cleared`."""
    zeros = fills(lambda _: 0)
    return jax.tree.map(lambda leaf: leaf if axes_waiting(leaf) else pick(where, zeros(leaf), leaf), accumulator)


def clear(tree: Tree) -> Tree:
    """Exact zeros of the same shapes and dtypes."""
    return jax.tree.map(zeros_like, tree)


def fits(accumulator: Tree, divisor: Scalar, dtypes: list[DType]) -> Scalar:
    """Whether every finite element of the accumulator stays finite in ``(accumulator / divisor).astype(dtype)``: a bool scalar.

    A finite float32 sum may be more than float16 can hold. Only leaves whose dtype has a smaller range than their sum's are looked at, and
    only the largest magnitude of each: dividing and rounding are monotonic. So this costs nothing for float32, bfloat16 and float64
    parameters, and with float32 masters.

    Args:
        accumulator: the tree of sums.
        divisor: a scalar, before clipping, which is decided on later.
        dtypes: the inner optimizer's gradients', one per leaf.
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
