"""The devices, their mesh, and what runs on them."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import gradaccum_jax

DEVICES = jax.device_count()
"""Four, and 64 in some checks."""
P: Any = jax.sharding.PartitionSpec
WHOLE = P()
MESH = jax.sharding.Mesh(np.array(jax.devices()), ("data",))
SHAPES = {"w": (3, 5), "b": (5,), "c": ()}
COLLECTIVE = re.compile(
    r" (all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute|collective-broadcast)(?:-start)?\("
)


def parameters() -> Any:
    rng = np.random.default_rng(1)
    return {name: jnp.asarray(rng.normal(size=shape)) for name, shape in SHAPES.items()}


def placed(tree: Any, specs: Any, mesh: Any = MESH) -> Any:
    """`specs` may be one for all."""
    if isinstance(specs, P):
        specs = jax.tree.map(lambda _: specs, tree)
    return jax.tree.map(
        lambda leaf, spec: jax.device_put(leaf, jax.sharding.NamedSharding(mesh, spec)),
        tree,
        specs,
    )


def over(function: Any, mesh: Any = MESH, axis: Any = "data") -> Any:
    return gradaccum_jax.data_parallel(function, mesh, axis)


def inside(
    function: Any, specs: Any, out: Any = WHOLE, mesh: Any = MESH, **options: Any
) -> Any:
    """`function` in a `jax.shard_map` of the user's own."""
    return jax.jit(
        jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=out, **options)
    )


def adam() -> Any:
    return optax.adam(0.1)


def assert_close(found: Any, wanted: Any, rtol: float = 1e-12) -> None:
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(
            np.asarray(a), np.asarray(b), rtol=rtol, atol=rtol
        ),
        found,
        wanted,
    )
