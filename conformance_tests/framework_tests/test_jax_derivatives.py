"""Derivatives through a window: by a weight, also of 0; where every gradient is 0."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradaccum

STEP = 2.0**-8
PARAMS = jnp.asarray([1.0, 2.0])
both_modes = pytest.mark.parametrize(
    "mode", [jax.grad, jax.jacfwd], ids=["reverse", "forward"]
)


def train(factors: Any, weights: Any = (None, None), **options: Any) -> Any:
    """A loss after one window. The gradient of each micro-batch is the parameters times
    its factor.
    """
    tx = gradaccum.wrap(optax.sgd(0.25), steps=2, **options)
    state, params = tx.init(PARAMS), PARAMS
    for factor, weight in zip(factors, weights, strict=True):
        updates, state = tx.update(params * factor, state, params, weight=weight)
        params = optax.apply_updates(params, updates)
    return jnp.sum(params**3)


def slope(function: Callable[[Any], Any], x: float) -> Any:
    """Richardson's forward difference. A central one would need a weight below 0."""
    near, far = ((function(x + step) - function(x)) / step for step in (STEP, 2 * STEP))
    return 2 * near - far


@both_modes
@pytest.mark.parametrize("on_overflow", ["skip_window", "drop_micro_batch"])
def test_derivative_by_weight(mode: Any, on_overflow: str) -> None:
    def loss(weight: Any, first: float = 3.0) -> Any:
        return train((first, 1.0), (weight, 2.0), on_overflow=on_overflow)

    derivative, compiled = jax.jit(mode(loss)), jax.jit(loss)
    for weight in (0.0, 0.5):
        found = derivative(weight)
        np.testing.assert_allclose(found, slope(compiled, weight), rtol=1e-2)
        assert abs(found) > 1
    if on_overflow == "drop_micro_batch":
        assert derivative(1.5, jnp.inf) == 0


@pytest.mark.parametrize("limit", [{}, {"clip_norm": 1.0}, {"skip_norm": 1.0}], ids=str)
@pytest.mark.parametrize("lift", [lambda f: f, jax.vmap], ids=["one", "members"])
def test_zero_gradient_window_has_a_derivative(lift: Any, limit: Any) -> None:
    """A plain square root in the norm would make it NaN."""
    factor = jnp.zeros(()) if lift is not jax.vmap else jnp.zeros(2)
    loss = jax.jit(lambda factor: train((factor, factor), **limit))
    found = jax.jit(lift(jax.grad(loss)))(factor)
    np.testing.assert_allclose(
        found, np.broadcast_to(slope(loss, 0.0), factor.shape), rtol=1e-2
    )
