"""A small epoch for JAX's neighbours: micro-batches of two items, the last one short,
so that the last window is short too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np
import optax

STEPS, ITEMS, FEATURES = 3, 15, 4
RNG = np.random.default_rng(11)
X, Y = RNG.normal(size=(ITEMS, FEATURES)), RNG.normal(size=(ITEMS, 1))
MICRO_BATCHES = [(X[i : i + 2], Y[i : i + 2]) for i in range(0, ITEMS, 2)]
LARGE_BATCHES = [
    (X[i : i + 2 * STEPS], Y[i : i + 2 * STEPS]) for i in range(0, ITEMS, 2 * STEPS)
]
"""Windows of 6, 6 and 3 items: the last one has two micro-batches, of two items and of
one.
"""
EPOCHS = 2


@contextmanager
def wide() -> Iterator[None]:
    """float64 within, and programs that compile quickly."""
    jax.config.update("jax_disable_most_optimizations", True)
    try:
        with (
            jax.enable_x64
            if hasattr(jax, "enable_x64")
            else jax.experimental.enable_x64
        )(True):
            yield
    finally:
        jax.config.update("jax_disable_most_optimizations", False)


def large_batch_run(
    loss: Callable[..., Any], params: Any, inner: optax.GradientTransformation
) -> Any:
    """The parameters after the epochs of the bare optimizer on the large batches."""
    state = inner.init(params)

    @jax.jit
    def step(params: Any, state: Any, x: Any, y: Any) -> Any:
        updates, state = inner.update(jax.grad(loss)(params, x, y), state, params)
        return optax.apply_updates(params, updates), state

    for _ in range(EPOCHS):
        for x, y in LARGE_BATCHES:
            params, state = step(params, state, x, y)
    return params


def assert_close(a: Any, b: Any, tolerance: float = 1e-12) -> None:
    """Leaf by leaf."""
    left, right = jax.tree.leaves(a), jax.tree.leaves(b)
    assert len(left) == len(right)
    for one, other in zip(left, right, strict=True):
        np.testing.assert_allclose(
            np.asarray(one), np.asarray(other), rtol=tolerance, atol=tolerance
        )


def assert_bitwise(a: Any, b: Any) -> None:
    """Leaf by leaf, with their dtypes."""
    left, right = jax.tree.leaves(a), jax.tree.leaves(b)
    assert len(left) == len(right)
    for one, other in zip(left, right, strict=True):
        assert one.dtype == other.dtype
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()
