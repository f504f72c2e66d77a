"""Many scalars, one from each tensor, made into one that XLA computes once.

XLA copies a chain of scalar additions or conjunctions into the fusion of every tensor that uses its end: n tensors, n chains of n links,
and a program whose size is the square of the model's. A barrier does not stop it, and a reduction of the stacked scalars becomes
a chain again.
What XLA leaves alone is a reduction with two results that need each other, as here.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def all_of(flags: list[Any]) -> Any:
    """Whether all of these bool scalars hold: True comes before False."""
    every = functools.reduce(jnp.logical_and, flags, jnp.asarray(True))
    return jnp.argmin(jnp.stack([every, jnp.asarray(False)])) == 1


@jax.custom_jvp
def sum_of(values: Any) -> Any:
    """The sum of a vector, compensated (Neumaier, 1974): as good as rounded once; inf or NaN where an element is."""
    nothing = jnp.zeros((), values.dtype)
    total, lost = lax.reduce((values, jnp.zeros_like(values)), (nothing, nothing), _add, (0,))
    return jnp.where(jnp.isfinite(total), total + lost, total)


@sum_of.defjvp
def _(primals: tuple[Any], tangents: tuple[Any]) -> tuple[Any, Any]:
    return sum_of(*primals), jnp.sum(*tangents)


def _add(a: tuple[Any, Any], b: tuple[Any, Any]) -> tuple[Any, Any]:
    """Of two pairs (sum, what rounding has lost of it); the loss is exact (Knuth, TAOCP 2, 4.2.2)."""
    total = a[0] + b[0]
    other = total - a[0]
    return total, a[1] + b[1] + ((a[0] - (total - other)) + (b[0] - other))
