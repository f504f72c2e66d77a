"""A session's trees in a file: flax's msgpack, which its users write; NumPy's archive if flax is not installed."""

from __future__ import annotations

import io
from importlib.util import find_spec
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def to_bytes(tree: dict[str, Any]) -> bytes:
    """`tree` in bytes."""
    if find_spec("flax"):
        from flax import serialization

        packed: bytes = serialization.to_bytes(tree)
        return packed
    file = io.BytesIO()
    np.savez(file, *(np.asarray(leaf) for leaf in jax.tree.leaves(tree)))
    return file.getvalue()


def from_bytes(data: bytes, like: dict[str, Any]) -> dict[str, Any]:
    """The saved tree in its own structure; NumPy's archive keeps no structure, so there it has that of `like`."""
    if find_spec("flax"):
        from flax import serialization

        plain: dict[str, Any] = serialization.msgpack_restore(data)
        return plain
    with np.load(io.BytesIO(data)) as archive:
        restored: dict[str, Any] = jax.tree.unflatten(jax.tree.structure(like), [_typed(array) for array in archive.values()])
    return restored


def _typed(array: Any) -> Any:
    """`array` with its dtype: NumPy's archive forgets that two bytes were a bfloat16."""
    return array.view(jnp.bfloat16) if array.dtype.kind == "V" else array
