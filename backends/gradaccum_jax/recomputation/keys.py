"""Random keys as the integers that they are made of: JAX 0.7.1 cannot compile a conditional whose gradient keeps a typed key."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from gradaccum_jax.types import Array


def kind_of(leaf: Array) -> Any:
    """The generator of a typed random key; None for anything else."""
    is_key = jnp.issubdtype(jnp.result_type(leaf), jax.dtypes.prng_key)
    return jax.random.key_impl(leaf) if is_key else None


def raw(leaf: Array) -> Array:
    """A typed key as uint32 integers, anything else as it is."""
    return leaf if kind_of(leaf) is None else jax.random.key_data(leaf)


def typed(leaf: Array, kind: Any) -> Array:
    """What `raw` was given, by its `kind_of`."""
    return leaf if kind is None else jax.random.wrap_key_data(leaf, impl=kind)
