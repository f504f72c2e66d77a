"""Limits of older JAX and optax, declared by the name that they lack."""

from __future__ import annotations

from typing import Any

import jax
import optax
import pytest

needs_shard_map = pytest.mark.skipif(
    not hasattr(jax, "shard_map"),
    reason=(
        "this JAX has no jax.shard_map, and gradaccum refuses a mesh axis by name there"
    ),
)
needs_microbatch = pytest.mark.skipif(
    not hasattr(optax, "microbatch"),
    reason="this optax has no optax.microbatch to compare with",
)


partition = optax.partition if hasattr(optax, "partition") else optax.multi_transform
"""`optax.partition`, or its older name of optax before 0.2.5."""


def on_mesh(mesh: Any) -> Any:
    """The context in which `mesh` is set."""
    library: Any = jax
    return (
        library.set_mesh(mesh)
        if hasattr(jax, "set_mesh")
        else library.sharding.use_mesh(mesh)
    )
