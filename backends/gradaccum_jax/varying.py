"""The mesh axes along which a value differs from device to device. `jax.shard_map` keeps them in the value's type.

A loop or a conditional must return the types that it was given: shapes, dtypes and, under ``check_vma=True``, these axes. A flag that
starts as True on all devices and is then measured on each has more axes at the end than at the start. So the axes are added before.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
from jax import lax

from gradaccum.kit import Scalar
from gradaccum_jax.types import Array, Axes, Leaves, Params, typeof

T = TypeVar("T")

if hasattr(jax, "shard_map"):
    shard_map: Any = jax.shard_map
else:
    from jax.experimental.shard_map import shard_map as _older

    shard_map = partial(_older, check_rep=False)
"""`jax.shard_map`. JAX before 0.6.1 has an older one, whose check of replication has no rule for much that gradaccum calls."""


def axes_of(value: Array) -> Axes:
    """The manual axes along which an array, or an abstract value, varies; none outside of `jax.shard_map`, and of what is no array."""
    if not isinstance(value, (jax.Array, jax.core.AbstractValue)):
        return frozenset()
    kind = value if isinstance(value, jax.core.AbstractValue) else typeof(value)
    if hasattr(kind, "vma"):
        return frozenset(kind.vma)
    return frozenset(getattr(getattr(kind, "mat", None), "varying", ()))


def vary(value: Array, axes: Axes) -> Array:
    """`value`, varying along `axes` too: the same numbers with another type."""
    missing = tuple(sorted(axes - axes_of(value)))
    if not missing:
        return value
    library: Any = lax  # JAX 0.10 has the first name, 0.7 the second
    return library.pcast(value, missing, to="varying") if hasattr(library, "pcast") else library.pvary(value, missing)


def vary_like(params: Params, state: T, shared: Axes = frozenset()) -> T:
    """`state`, each of its arrays varying along every axis that some parameter varies along, but for the `shared` ones.

    Each device decides on its own window, so from the start the state may differ from device to device.
    """
    axes = frozenset[str]().union(*(axes_of(leaf) for leaf in jax.tree.leaves(params))) - shared
    return cast(T, jax.tree.map(lambda leaf: vary(leaf, axes), state)) if axes else state


def settled(predicate: Scalar, function: Callable[..., Leaves], leaves: Leaves) -> tuple[Any, Leaves]:
    """`function` traced, and `leaves` with all axes that its results may have where `predicate` decides whether it runs.

    Args:
        predicate: bool scalar.
        function: of the leaves, returns as many.
        leaves: arrays.
    """
    while True:
        closed = jax.make_jaxpr(function)(*leaves)
        wanted = [axes_of(leaf) | axes_of(made) | axes_of(predicate) for leaf, made in zip(leaves, closed.out_avals, strict=True)]
        if wanted == [axes_of(leaf) for leaf in leaves]:
            return closed, leaves
        leaves = [vary(leaf, axes) for leaf, axes in zip(leaves, wanted, strict=True)]


def every(flag: Scalar, axes: Axes) -> Scalar:
    """Whether `flag` holds on every device along `axes`."""
    return lax.pmin(flag.astype(jnp.int32), tuple(sorted(axes))) > 0  # type: ignore[no-untyped-call]


ShardAxes = tuple[str, ...] | None
"""The axes along which parameters are sharded; None: nobody said."""


def shards_of(leaf: Array, shard_axes: ShardAxes) -> tuple[str, ...]:
    """The axes along which the devices hold parts of `leaf`."""
    return tuple(sorted(axes_of(leaf) & frozenset(shard_axes or ())))


def everywhere(flag: Scalar, shard_axes: ShardAxes) -> Scalar:
    """Whether `flag` holds on every device that has a part of the model: a bool scalar."""
    axes = shards_of(flag, shard_axes)
    return every(flag, frozenset(axes)) if axes else flag


KNOWS_AXES = hasattr(jax, "shard_map")
"""JAX 0.5 and 0.6.0 have `jax.experimental.shard_map` only, where a value's type does not say along which axes devices differ."""
