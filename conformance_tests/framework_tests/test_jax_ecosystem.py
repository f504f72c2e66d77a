"""The wrapped transformation inside the training states and optimizers of flax and equinox."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradaccum
import gradaccum_jax

PARAMS = {"layer": {"w": jnp.asarray([[1.0, -2.0], [0.5, 4.0]])}, "b": jnp.asarray([0.25, 3.0])}


def assert_bitwise(a: Any, b: Any) -> None:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for left, right in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert left.dtype == right.dtype
        assert np.asarray(left).tobytes() == np.asarray(right).tobytes()


def test_flax_train_state() -> None:
    train_state = pytest.importorskip("flax.training.train_state", reason="flax is not installed")
    state = train_state.TrainState.create(apply_fn=None, params=PARAMS, tx=gradaccum.wrap(optax.sgd(0.5), steps=2))
    apply = jax.jit(lambda state, g: state.apply_gradients(grads=g))
    grads = jax.tree.map(jnp.ones_like, PARAMS)
    first = apply(state, grads)
    assert_bitwise(first.params, PARAMS)
    second = apply(first, grads)
    np.testing.assert_array_equal(second.params["b"], PARAMS["b"] - 0.5)
    assert gradaccum_jax.result(second.opt_state).applied


def test_flax_nnx_optimizer() -> None:
    nnx = pytest.importorskip("flax.nnx", reason="flax is not installed")
    model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    before = np.asarray(model.kernel[...])
    optimizer = nnx.Optimizer(model, gradaccum.wrap(optax.sgd(0.5), steps=2), wrt=nnx.Param)

    @nnx.jit
    def train(model: Any, optimizer: Any, x: Any) -> None:
        optimizer.update(model, nnx.grad(lambda model: jnp.sum(model(x)))(model), weight=2)

    train(model, optimizer, jnp.asarray([[1.0, 3.0]]))
    np.testing.assert_array_equal(np.asarray(model.kernel[...]), before)
    assert gradaccum_jax.result(optimizer.opt_state).micro_step == 1
    train(model, optimizer, jnp.asarray([[3.0, 5.0]]))
    np.testing.assert_allclose(np.asarray(model.kernel[...]), before - 0.5 * np.asarray([[2.0], [4.0]]), rtol=1e-6)
    assert gradaccum_jax.result(optimizer.opt_state).applied


def test_equinox_filtered_parameters() -> None:
    eqx = pytest.importorskip("equinox", reason="equinox is not installed")
    model = eqx.nn.MLP(2, 1, 4, 1, key=jax.random.key(0))
    tx = gradaccum.wrap(optax.adamw(0.1), steps=2)
    state = tx.init(eqx.filter(model, eqx.is_inexact_array))

    @eqx.filter_jit
    def train(model: Any, state: Any, x: Any) -> Any:
        grads = eqx.filter_grad(lambda model: jnp.sum(model(x) ** 2))(model)
        updates, state = tx.update(grads, state, eqx.filter(model, eqx.is_inexact_array))
        return eqx.apply_updates(model, updates), state

    first, state = train(model, state, jnp.asarray([1.0, 2.0]))
    assert_bitwise(eqx.filter(first, eqx.is_array), eqx.filter(model, eqx.is_array))
    second, state = train(first, state, jnp.asarray([2.0, 1.0]))
    assert np.any(np.asarray(second.layers[0].weight) != np.asarray(model.layers[0].weight))
    assert gradaccum_jax.result(state).optimizer_step == 1


def test_equinox_model_as_parameters() -> None:
    eqx = pytest.importorskip("equinox", reason="equinox is not installed")
    model = eqx.nn.MLP(2, 1, 4, 1, key=jax.random.key(0))
    tx = gradaccum.wrap(optax.sgd(0.1), steps=1)
    grads = eqx.filter_grad(lambda model: jnp.sum(model(jnp.ones(2))))(model)
    updates, state = tx.update(grads, tx.init(eqx.filter(model, eqx.is_inexact_array)), model)
    np.testing.assert_allclose(updates.layers[0].weight, -0.1 * grads.layers[0].weight, rtol=1e-6)
    assert gradaccum_jax.result(state).applied
