"""The devices, their mesh, and some parameters."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import gradaccum_jax

DEVICES = jax.device_count()
"""Four, and 64 in some checks."""
P: Any = jax.sharding.PartitionSpec
MESH = jax.sharding.Mesh(np.array(jax.devices()), ("data",))
SHAPES = {"w": (3, 5), "b": (5,), "c": ()}


def parameters() -> Any:
    rng = np.random.default_rng(1)
    return {name: jnp.asarray(rng.normal(size=shape)) for name, shape in SHAPES.items()}


def over(function: Any, mesh: Any = MESH, axis: Any = "data") -> Any:
    return gradaccum_jax.data_parallel(function, mesh, axis)


def adam() -> Any:
    return optax.adam(0.1)
