"""A whole window of a wrapped optimizer in one call: every option does what it does for a window that is streamed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradaccum
import gradaccum_jax
from conformance_tests.framework_tests.jax_large_batch import close, data, float64, mean_loss, model

SIZE = 4
SCALED = gradaccum.DynamicLossScale(init_scale=2.0**8)


@pytest.fixture(autouse=True)
def wide() -> Iterator[None]:
    with float64():
        yield


def test_leaves_that_take_no_part() -> None:
    params = {"w": jnp.ones(2), "n": jnp.arange(2), "key": jax.random.key(0), "none": None}
    tx = gradaccum.wrap(optax.sgd(1.0), steps=None)
    step = gradaccum_jax.value_and_update(lambda params, x: jnp.mean(x @ params["w"]) * params["n"][1], tx, steps=2)
    _, updates, _ = step(params, tx.init(params), np.ones((4, 2)))
    np.testing.assert_array_equal(updates["w"], [-1, -1])
    np.testing.assert_array_equal(updates["n"], [0, 0])
    assert updates["key"] is updates["none"] is None


def test_open_window_belongs_to_the_update() -> None:
    """Two items were streamed before; the call brings four more, and closes the window of six."""
    tx = gradaccum.wrap(optax.sgd(1.0), steps=None)
    params = jnp.ones(())
    _, state = tx.update(jnp.asarray(5.0), tx.init(params), params, weight=2)
    _, updates, state = gradaccum_jax.value_and_update(lambda p, x: p * jnp.mean(x), tx, steps=2)(params, state, np.full(4, 2.0))
    assert float(updates) == -(2 * 5 + 4 * 2) / 6
    assert (int(state.micro_step), int(state.optimizer_step)) == (0, 1)


def test_aux_weights_and_extra_arguments() -> None:
    """Weights of items, an aux, and an argument of the inner optimizer's: `optax.scale_by_backtracking_linesearch`-like ones want it."""

    def update(updates: Any, state: Any, params: Any = None, *, factor: Any, **_: Any) -> Any:
        return jax.tree.map(lambda leaf: -factor * leaf, updates), state

    tx = gradaccum.wrap(optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update), steps=None)
    weights = np.array([1.0, 3.0, 0.0, 1.0])

    def loss(params: Any, x: Any, w: Any) -> Any:
        return params * jnp.sum(x * w) / jnp.sum(w), {"largest": x.max(), "x": x}

    step = gradaccum_jax.value_and_update(loss, tx, True, micro_batch_size=3, weight=weights, aux={"largest": "max", "x": "concatenate"})
    params, x = jnp.asarray(2.0), np.array([1.0, 2.0, 9.0, 4.0])
    (value, aux), updates, _ = step(params, tx.init(params), x, weights, factor=10.0)
    close((value, updates), (jnp.asarray(2 * 11 / 5), jnp.asarray(-10 * 11 / 5)))
    assert aux["largest"] == 9
    np.testing.assert_array_equal(aux["x"], x)


def test_traced_weight_that_is_negative_makes_no_update() -> None:
    """Nobody can look at it: the loss is NaN, and the window ends as one that overflowed."""
    tx = gradaccum.wrap(optax.sgd(1.0), steps=None)
    step = gradaccum_jax.value_and_update(lambda p, x: p * jnp.mean(x), tx, steps=2, weight=lambda x: x[0] - 3)
    value, updates, state = step(jnp.ones(()), tx.init(jnp.ones(())), np.ones(4))
    assert np.isnan(value)
    assert updates == 0
    assert gradaccum_jax.result(state).overflow


def test_many_windows_in_one_scan_with_donation() -> None:
    """Under jit and scan, parameters and state donated: each window as plain optax makes it."""
    tx = gradaccum.wrap(optax.adam(0.1), steps=None)
    step = gradaccum_jax.value_and_update(mean_loss, tx, steps=3)
    batches = tuple(np.stack([leaf, leaf + 1, leaf * 2]) for leaf in data())

    def train(params: Any, state: Any) -> Any:
        def one(carry: Any, batch: Any) -> Any:
            loss, updates, state = step(*carry, *batch)
            return (optax.apply_updates(carry[0], updates), state), loss

        return jax.lax.scan(one, (params, state), batches)

    (params, state), losses = jax.jit(train, donate_argnums=(0, 1))(model(), tx.init(model()))
    inner, wanted = optax.adam(0.1), model()
    held = inner.init(wanted)
    for index, batch in enumerate(zip(*batches, strict=True)):
        loss, gradient = jax.value_and_grad(mean_loss)(wanted, *batch)
        updates, held = inner.update(gradient, held, wanted)
        wanted = optax.apply_updates(wanted, updates)
        close(losses[index], loss, 1e-12)
    close(params, wanted, 1e-12)
    assert int(state.optimizer_step) == 3
