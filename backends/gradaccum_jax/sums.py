"""Primitives over gradient trees: zeros, add, divide, clear.

The accumulator has the structure of the parameters. Gradients come as a list aligned with its leaves (`checks.align`), None
where a parameter took no part. Additions are plain elementwise expressions, so that XLA fuses them into one pass in place.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from gradaccum import ArgumentValueError
from gradaccum.kit import explain
from gradaccum_jax.dtypes import is_key, standard, takes_part, wider
from gradaccum_jax.folds import all_of

Dtypes = list[Any]


def sum_dtype(leaf: Any, accumulate_dtype: Any) -> Any:
    """The dtype in which gradients of `leaf` are summed.

    float32 for half precision and below, the leaf's own otherwise; `accumulate_dtype` instead if it is given and the leaf is not
    of integers. Complex leaves stay complex.

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


def zeros(params: Any, accumulate_dtype: Any) -> Any:
    """An empty accumulator for `params`: exact zeros, one array per leaf; None for random keys, and where there is None."""

    def empty(leaf: Any) -> Any:
        return None if is_key(leaf) else jnp.zeros_like(leaf, dtype=sum_dtype(leaf, accumulate_dtype))

    return jax.tree.map(empty, params)


def weight_dtype(accumulator: Any) -> Any:
    """float64 if any leaf is float64 or complex128, else float32."""
    wide = any(leaf.dtype in ("float64", "complex128") for leaf in jax.tree.leaves(accumulator))
    return jnp.dtype("float64" if wide else "float32")


def add(accumulator: Any, gradients: list[Any], factor: Any, kept: Any, counted: Any = None) -> Any:
    """``accumulator + factor * gradients`` where `kept` holds, else `accumulator`; by select, because 0 x NaN is NaN.

    Args:
        accumulator: the tree of sums.
        gradients: aligned with its leaves; None adds nothing.
        factor: a scalar; None: 1, without a multiplication.
        kept: a bool scalar.
        counted: a bool scalar, with a factor only; see `add_weighted`.
    """

    def add_leaf(held: Any, gradient: Any) -> Any:
        if gradient is None:
            return held
        gradient = standard(gradient)
        if factor is not None:
            return add_weighted(held, gradient, factor, kept, counted)
        return jnp.where(kept, (held + gradient).astype(held.dtype), held)

    leaves, structure = jax.tree.flatten(accumulator)
    return jax.tree.unflatten(structure, [add_leaf(held, gradient) for held, gradient in zip(leaves, gradients, strict=True)])


def all_finite(gradients: list[Any]) -> Any:
    """Whether every element of every gradient that is there is finite: a bool scalar."""
    return all_of([jnp.all(jnp.isfinite(gradient)) for gradient in gradients if gradient is not None])


def divide(accumulator: Any, divisor: Any, dtypes: Dtypes) -> Any:
    """``accumulator / divisor`` in `dtypes`, one per leaf: the gradient for the inner optimizer."""
    leaves, structure = jax.tree.flatten(accumulator)
    return jax.tree.unflatten(structure, [(leaf / divisor).astype(dtype) for leaf, dtype in zip(leaves, dtypes, strict=True)])


def clear(tree: Any) -> Any:
    """Exact zeros of the same shapes and dtypes."""
    return jax.tree.map(jnp.zeros_like, tree)


def fits(accumulator: Any, divisor: Any, dtypes: list[Any]) -> Any:
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


@jax.custom_jvp
def add_weighted(held: Any, gradient: Any, weight: Any, kept: Any, counted: Any) -> Any:
    """``held + weight * gradient`` in the dtype of `held` where `kept` holds, else `held`.

    Args:
        held: the sum, any shape.
        gradient: of the same shape.
        weight: a scalar.
        kept: bool scalar: the product is added.
        counted: bool scalar: it would be at any other weight; where it is not, the derivative by the weight is 0.
    """
    total = (held + weight * gradient).astype(held.dtype)
    return jnp.where(kept, total, held)


@add_weighted.defjvp
def _(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Any, Any]:
    held, gradient, weight, kept, counted = primals
    moved, turned, heavier, *_ = tangents
    by_gradient = jnp.where(kept, weight * turned, 0)
    by_weight = heavier * jnp.where(counted, gradient, 0)
    return add_weighted(*primals), (moved + by_gradient + by_weight).astype(held.dtype)
