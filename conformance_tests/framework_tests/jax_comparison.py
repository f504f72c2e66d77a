"""Comparisons of two nests of JAX's arrays, and float64 for a test."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .jax_large_batch import float64


@contextmanager
def wide() -> Iterator[None]:
    """float64 within, and programs that compile quickly."""
    jax.config.update("jax_disable_most_optimizations", True)
    try:
        with float64():
            yield
    finally:
        jax.config.update("jax_disable_most_optimizations", False)


def leaf_pairs(a: Any, b: Any) -> Iterator[tuple[Any, Any]]:
    """The leaves of two nests of one structure, whose dtypes are the same."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for one, other in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert jnp.asarray(one).dtype == jnp.asarray(other).dtype
        yield np.asarray(one), np.asarray(other)


def assert_close(a: Any, b: Any, tolerance: float = 1e-12) -> None:
    for one, other in leaf_pairs(a, b):
        np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance)


def assert_bitwise(a: Any, b: Any) -> None:
    for one, other in leaf_pairs(a, b):
        assert one.tobytes() == other.tobytes()
