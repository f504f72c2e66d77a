"""Folds of many scalars, one from each tensor, into one that XLA computes once.

XLA copies a chain of scalar additions or conjunctions into the fusion of every tensor that uses its end: n tensors, n chains of n links,
and a program whose size is the square of the model's. A barrier does not stop it, and XLA turns a reduction of the stacked scalars into a
chain again. It leaves alone a reduction with two results that need each other. Both folds here are such reductions.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax

from gradaccum.kit import Scalar
from gradaccum_jax.types import Array

Pair = tuple[Array, Array]
"""A sum, and the rounding error that it has lost."""


def all_of(flags: list[Scalar]) -> Scalar:
    """Whether all of these bool scalars hold: `argmin` of (all, False) is 1 only where the first is True."""
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
