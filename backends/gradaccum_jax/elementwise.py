"""Elementwise operations on every array of a model, in as few equations of the traced program as there are.

`jax.numpy` promotes, broadcasts and jits: `jnp.where` alone is a function of its own in the program, called once for each array. For arrays
of one shape and dtype `jax.lax` says the same in one equation each. Elsewhere `jax.numpy` does it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax

from gradaccum.kit import Scalar
from gradaccum_jax.types import Array, DType, typeof


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
    """`leaf` in `dtype`; the same if it is."""
    return leaf if leaf.dtype == dtype else leaf.astype(dtype)


def _like(a: Array, b: Array) -> bool:
    return bool(a.dtype == b.dtype and a.shape == b.shape)
