"""Derivatives through a window equal finite differences, also by a weight of 0 and
where every gradient is 0.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradaccum
import gradaccum_jax

STEP = 2.0**-8
PARAMS = jnp.asarray([1.0, 2.0])


def train(
    factors: tuple[Any, Any], weights: tuple[Any, Any] | None = None, **options: Any
) -> Any:
    """Return a loss after one window. The gradient of each micro-batch is the
    parameters times its factor.
    """
    tx = gradaccum.wrap(optax.sgd(0.25), steps=2, **options)
    state, params = tx.init(PARAMS), PARAMS
    for index, factor in enumerate(factors):
        updates, state = tx.update(
            params * factor, state, params, weight=weights and weights[index]
        )
        params = optax.apply_updates(params, updates)
    return jnp.sum(params**3)


@functools.cache
def loss_of_weight(on_overflow: str) -> Callable[[Any], Any]:
    """Return the loss of a window by its first weight, compiled once for all tests."""
    return jax.jit(
        lambda weight: train((3.0, 1.0), (weight, 2.0), on_overflow=on_overflow)
    )


@functools.cache
def derivative(mode: Any, on_overflow: str) -> Callable[[Any], Any]:
    return jax.jit(mode(loss_of_weight(on_overflow)))


def slope(function: Callable[[Any], Any], x: float) -> Any:
    """Return Richardson's forward difference. A central one would need a weight below
    0.
    """
    near, far = ((function(x + step) - function(x)) / step for step in (STEP, 2 * STEP))
    return 2 * near - far


@pytest.mark.parametrize("on_overflow", ["skip_window", "drop_micro_batch"])
@pytest.mark.parametrize("weight", [0.0, 0.5])
@pytest.mark.parametrize("mode", [jax.grad, jax.jacfwd], ids=["reverse", "forward"])
def test_derivative_by_weight(mode: Any, weight: float, on_overflow: str) -> None:
    found = derivative(mode, on_overflow)(weight)
    np.testing.assert_allclose(
        found, slope(loss_of_weight(on_overflow), weight), rtol=1e-2
    )
    assert abs(found) > 1


def test_dropped_weight_has_no_derivative() -> None:
    """The weight of a micro-batch that was dropped changes nothing."""
    found = jax.jit(
        jax.grad(
            lambda weight: train(
                (jnp.inf, 1.0), (weight, 2.0), on_overflow="drop_micro_batch"
            )
        )
    )(1.5)
    assert found == 0


@pytest.mark.parametrize(
    "options", [{}, {"clip_norm": 1.0}, {"skip_norm": 1.0}], ids=str
)
@pytest.mark.parametrize("lift", [lambda f: f, jax.vmap], ids=["one", "members"])
def test_zero_gradient_window_has_a_derivative(
    lift: Any, options: dict[str, Any]
) -> None:
    """A plain square root in the norm would make it NaN."""
    factor = jnp.zeros(()) if lift is not jax.vmap else jnp.zeros(2)
    loss = jax.jit(lambda factor: train((factor, factor), **options))
    found = jax.jit(lift(jax.grad(loss)))(factor)
    expected = slope(loss, 0.0)
    np.testing.assert_allclose(
        found, np.broadcast_to(expected, factor.shape), rtol=1e-2
    )


@pytest.mark.parametrize("lift", [jax.grad, jax.jacfwd], ids=["reverse", "forward"])
@pytest.mark.parametrize("weights", [[1.0, 2.0], [0.0, 2.0]])
def test_derivative_of_the_windows_loss_by_the_weights(
    lift: Any, weights: list[float]
) -> None:
    """Of (3 a + 5 b) / (a + b), at weight 0 too: in a streamed window, and in one
    call.
    """
    a, b = weights
    wanted = [-2 * b / (a + b) ** 2, 2 * a / (a + b) ** 2]
    tx, params = gradaccum.wrap(optax.sgd(1.0), steps=2), jnp.ones(2)

    def streamed(weights: Any) -> Any:
        state = tx.init(params)
        for weight, loss in zip(weights, (3.0, 5.0), strict=True):
            _, state = tx.update(params, state, params, weight=weight, value=loss)
        return gradaccum_jax.result(state).loss

    def called(weights: Any) -> Any:
        losses = gradaccum_jax.value_and_grad(
            lambda p, x, w: (p.sum() / 2 * x).mean(),
            steps=2,
            weight=lambda x, w: w.sum(),
        )
        return losses(params, jnp.asarray([3.0, 5.0]), weights)[0]

    for function in (streamed, called):
        np.testing.assert_allclose(
            lift(function)(jnp.asarray(weights)), wanted, rtol=1e-5
        )
