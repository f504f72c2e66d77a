"""Which dtypes meet at the end of a window: those of parameters, gradients, sums, and of what the inner optimizer is handed.

JAX promotes no float8 by itself: here it is narrower than every other float.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from gradaccum_jax.trees import is_none


class Handed(NamedTuple):
    """The dtypes of the inner optimizer's gradients, one per leaf of the accumulator."""

    given: list[Any]
    """The gradient's, as the optimizer gets it."""
    like: list[Any]
    """Its updates come in the dtypes they have for such gradients. The two differ only where nobody knows the micro-batches' dtype."""


def handed(accumulator: Any, params: Any, gradients: list[Any] | None) -> Handed:
    """The wider of parameter and gradient: the caller who widened a gradient wants what plain optax makes of it.

    A gradient that is unknown (a flush; a parameter that took no part in the last micro-batch) may have been either. The sum is then
    handed on unrounded, and the updates have the parameter's dtype, as for gradients that nobody widened.

    Args:
        accumulator: the tree of sums.
        params: the tree of parameters, or of their masters; None, or one of another structure, is unknown.
        gradients: of the last micro-batch, aligned with the accumulator's leaves, None where there is none; or None.
    """
    sums = jax.tree.leaves(accumulator)
    pairs = list(zip(_leaves_like(params, accumulator), gradients or [None] * len(sums), strict=True))
    given = [_wider_of(p, leaf if g is None else g) if takes_part(leaf) else leaf.dtype for leaf, (p, g) in zip(sums, pairs, strict=True)]
    like = [own if g is not None or p is None else jnp.result_type(p) for own, (p, g) in zip(given, pairs, strict=True)]
    return Handed(given, like)


def takes_part(leaf: Any) -> bool:
    """Whether it is of a real or complex floating dtype. Others have no gradient and stay as they are."""
    return bool(jnp.issubdtype(jnp.result_type(leaf), jnp.inexact))


def is_key(leaf: Any) -> bool:
    """Whether it is of random keys, which cannot be added to anything."""
    return bool(jnp.issubdtype(jnp.result_type(leaf), jax.dtypes.extended))


def wider(a: Any, b: Any) -> Any:
    """The dtype that holds both."""
    a, b = jnp.dtype(a), jnp.dtype(b)
    with jax.numpy_dtype_promotion("standard"):
        return a if a == b else jnp.promote_types(_promotable(a), _promotable(b))


def standard(leaf: Any) -> Any:
    """`leaf`, float8 as float32: in a dtype that JAX computes with others of."""
    own = jnp.result_type(leaf)
    return leaf if own == _promotable(own) else jnp.asarray(leaf).astype(jnp.float32)


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


def _promotable(dtype: Any) -> Any:
    return jnp.dtype("float32") if dtype.itemsize < 2 and jnp.issubdtype(dtype, jnp.floating) else dtype


def _wider_of(parameter: Any, other: Any) -> Any:
    return jnp.result_type(other) if parameter is None else wider(jnp.result_type(parameter), jnp.result_type(other))


def _leaves_like(params: Any, accumulator: Any) -> list[Any]:
    """Those of `params` in the accumulator's places; None each if it is another tree."""
    held = jax.tree.leaves(accumulator, is_leaf=is_none)
    structures: list[Any] = [jax.tree.structure(tree, is_leaf=is_none) for tree in (params, accumulator)]
    known = jax.tree.leaves(params, is_leaf=is_none) if structures[0] == structures[1] else [None] * len(held)
    return [p for p, leaf in zip(known, held, strict=True) if leaf is not None]
