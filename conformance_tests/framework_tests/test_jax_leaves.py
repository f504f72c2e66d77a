"""Unusual parameters: integers, flags, random keys, negative zeros, and gradients in NumPy's memory."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
from numpy.testing import assert_array_equal

import gradaccum
import gradaccum_jax

FLOAT0 = np.zeros((), jax.dtypes.float0)
STILL = {
    "count": jnp.asarray(16777217, jnp.int32),
    "key": jax.random.PRNGKey(123456789),
    "flag": jnp.asarray([True, False]),
    "byte": jnp.asarray(200, jnp.uint8),
}


def test_integers_and_flags_stay_bitwise() -> None:
    """Also where float32 has gaps, and where the optimizer decays. Each update has the
    dtype of its parameter, so that optax casts none.
    """
    tx = gradaccum.wrap(optax.adamw(0.5, weight_decay=0.5), 2)
    params = {"w": jnp.ones(2), **STILL}
    state = tx.init(params)
    given = []
    for absent in (None, FLOAT0, None):
        grads = {"w": jnp.ones(2), **dict.fromkeys(STILL, absent)}
        updates, state = tx.update(grads, state, params)
        given.append(updates)
    given.append(gradaccum_jax.flush(tx, state, params)[0])
    for updates in given:
        params = optax.apply_updates(params, updates)
        for still, leaf in STILL.items():
            assert updates[still].dtype == leaf.dtype
            assert_array_equal(params[still], leaf)
    assert np.all(np.asarray(params["w"]) < 0.5)


def test_typed_keys_have_no_update() -> None:
    """Nothing can be added to a random key."""
    tx = gradaccum.wrap(optax.sgd(0.5), 2)
    params = {"key": jax.random.key(7), "w": jnp.ones(2)}
    state = start = tx.init(params)
    for absent in (FLOAT0, None):
        updates, state = jax.jit(tx.update)(
            {"key": absent, "w": jnp.ones(2)}, state, params
        )
        assert updates["key"] is None
    assert_array_equal(updates["w"], [-0.5, -0.5])
    assert jax.tree.map(jax.typeof, state) == jax.tree.map(jax.typeof, start)


def test_complex_parameter_equals_the_large_batch() -> None:
    """Both of its parts are summed, and count in the norm. No sign of a zero changes
    before.
    """
    tx = gradaccum.wrap(optax.sgd(1.0), 2, clip_norm=1.0, accumulate_dtype="float32")
    params = jnp.asarray([complex(-0.0, -0.0)])
    updates, state = tx.update(jnp.asarray([2.0 + 8.0j]), tx.init(params), params)
    moved = optax.apply_updates(params, updates)
    assert np.asarray(moved).tobytes() == np.asarray(params).tobytes()
    updates, state = tx.update(jnp.asarray([4.0 + 0.0j]), state, params)
    assert gradaccum_jax.result(state).grad_norm == 5
    np.testing.assert_allclose(updates, [-0.6 - 0.8j], rtol=1e-6)


def test_numpys_memory_may_be_written_over() -> None:
    """JAX itself reads it after the call has returned."""
    tx = gradaccum.wrap(optax.sgd(1.0), 1)
    memory = np.empty(2**20, np.float32)
    params = jnp.zeros(2**20)
    state = tx.init(params)
    for step in range(10):
        memory[...] = step
        updates, state = tx.update(memory, state, params)
        memory[...] = -1.0
        assert_array_equal(updates, -step)
