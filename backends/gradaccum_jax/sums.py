"""Primitives over gradient trees: zeros, add, divide, clear.

The accumulator has the structure of the parameters. Gradients come as a list aligned with its leaves (`checks.align`), None
where a parameter took no part. Additions are plain elementwise expressions, so that XLA fuses them into one pass in place.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from gradaccum import ArgumentValueError
from gradaccum.kit import explain
from gradaccum_jax.dtypes import is_key, standard, takes_part
from gradaccum_jax.folds import all_of
from gradaccum_jax.weighted import add_weighted

Dtypes = list[Any]


def accumulate_dtype_of(leaf: Any, accumulate_dtype: Any) -> Any:
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
        return None if is_key(leaf) else jnp.zeros_like(leaf, dtype=accumulate_dtype_of(leaf, accumulate_dtype))

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


def cast_like(tree: Any, like: Any) -> Any:
    """`tree` in the dtypes of `like`, never weakly typed; what is None there is taken from `like`."""

    def cast(leaf: Any, model: Any) -> Any:
        return model if leaf is None else _strong(leaf, jnp.result_type(model))

    return jax.tree.map(cast, tree, like, is_leaf=lambda node: node is None)


def strong(tree: Any) -> Any:
    """`tree` as arrays of the same dtypes, none of them weakly typed: a scan's carry must not change type."""
    return jax.tree.map(lambda leaf: _strong(leaf, jnp.result_type(leaf)), tree)


def _strong(leaf: Any, dtype: Any) -> Any:
    if jnp.issubdtype(dtype, jax.dtypes.extended):  # random keys
        return leaf
    return lax.convert_element_type(leaf, dtype)
