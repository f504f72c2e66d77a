"""Names for the arguments of this package.

A type checker takes most of them for `Any`: JAX hands the same function arrays and tracers, and users hand it NumPy's arrays and Python's
numbers beside them. `Scalar` is `gradaccum.kit`'s.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import jax

Array = Any
"""A `jax.Array`, concrete or traced, or what JAX takes for one: a NumPy array, a Python number."""

DType = Any
"""A dtype, or what `jnp.dtype` makes into one."""

Tree = Any
"""A pytree of arrays: dicts, lists, tuples, registered classes."""

Params = Any
"""The tree of the model's parameters; None where the caller gave none."""

Updates = Any
"""The tree of updates that `optax.apply_updates` adds to the parameters, or of their shapes and dtypes."""

InnerState = Any
"""The tree that the inner optimizer keeps. Under `masters.on_masters` and `masters.without_masters`: the pair (its own state, masters)."""

Leaves = list[Array]
"""The leaves of a tree, in JAX's order."""

Gradients = list[Array]
"""A micro-batch's gradients in the order of the accumulator's leaves, None for a parameter that took no part: see `alignment.align`."""

Axes = frozenset[str]
"""Names of mesh axes."""

Extra = dict[str, Any]
"""Keyword arguments that are passed on to the inner optimizer."""

typeof: Any = jax.typeof
"""`jax.typeof`, whose annotations a type checker does not take."""

reshard: Any = getattr(jax.sharding, "reshard", None) or import_module("jax.experimental.shard").reshard
"""`jax.sharding.reshard`, which JAX 0.5 and 0.6 have in `jax.experimental.shard` alone."""
