"""float32 gradients of half-precision parameters: the inner optimizer gets them as plain optax would, not rounded to the parameter."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("optax", reason="optax is not installed")
import jax
import jax.numpy as jnp
import optax

import gradaccum
import gradaccum_jax

CASES = {
    "bfloat16_fraction": (optax.sgd(1.0), jnp.bfloat16, 1.00390625),
    "float16_tiny": (optax.adam(0.05), jnp.float16, 1e-8),
    "float16_large": (optax.adam(0.1), jnp.float16, 1e5),
}


@pytest.mark.parametrize("accumulate_dtype", [None, "float32"])
@pytest.mark.parametrize("case", CASES)
def test_the_optimizer_gets_the_wider_dtype(case: str, accumulate_dtype: Any) -> None:
    inner, dtype, value = CASES[case]
    params, gradient = jnp.ones(2, dtype), jnp.full(2, value, jnp.float32)
    expected, _ = inner.update(gradient, inner.init(params), params)
    tx = gradaccum.wrap(inner, steps=2, accumulate_dtype=accumulate_dtype)
    state = start = tx.init(params)
    for _ in range(2):
        updates, state = tx.update(gradient, state, params)
    assert gradaccum_jax.result(state).applied
    assert updates.dtype == expected.dtype == jnp.float32
    np.testing.assert_allclose(updates, expected, rtol=1e-6)
    assert jax.tree.map(jax.typeof, state) == jax.tree.map(jax.typeof, start)


def test_a_half_gradient_stays_half() -> None:
    tx, params = gradaccum.wrap(optax.sgd(1.0), steps=1), jnp.ones(2, jnp.bfloat16)
    assert tx.update(params, tx.init(params), params)[0].dtype == jnp.bfloat16


@pytest.mark.parametrize("steps", [None, 4])
def test_flush_hands_on_the_unrounded_sum(steps: Any) -> None:
    """It cannot know the gradients' dtype. Its updates have that of the parameters it is given, so float32 ones keep all."""
    params, gradient = jnp.ones(2, jnp.bfloat16), jnp.full(2, 1.00390625, jnp.float32)
    tx = gradaccum.wrap(optax.sgd(1.0), steps=steps)
    _, state = tx.update(gradient, tx.init(params), params)
    assert gradaccum_jax.flush(tx, state, params)[0].dtype == jnp.bfloat16
    np.testing.assert_array_equal(gradaccum_jax.flush(tx, state, optax.tree.cast(params, jnp.float32))[0], -gradient)


def test_flush_makes_no_nan_of_a_tiny_gradient() -> None:
    params, tx = jnp.ones(2, jnp.float16), gradaccum.wrap(optax.adam(0.05), steps=4)
    _, state = tx.update(jnp.full(2, 1e-8, jnp.float32), tx.init(params), params)
    updates, state = gradaccum_jax.flush(tx, state, params)
    np.testing.assert_array_equal(updates, np.full(2, -0.025, np.float16))


def test_a_flush_beyond_the_parameters_range_is_an_overflow() -> None:
    """Its update would be in float16."""
    params, tx = jnp.ones(2, jnp.float16), gradaccum.wrap(optax.sgd(1.0), steps=4)
    _, state = tx.update(jnp.full(2, 1e5, jnp.float32), tx.init(params), params)
    assert gradaccum_jax.result(gradaccum_jax.flush(tx, state, params)[1]).overflow


def test_a_parameter_missing_from_the_last_micro_batch_is_not_rounded() -> None:
    params, tx = jnp.ones(2, jnp.float16), gradaccum.wrap(optax.adam(0.05), steps=2)
    _, state = tx.update(jnp.full(2, 2e-8, jnp.float32), tx.init(params), params)
    updates, _ = tx.update(None, state, params)
    np.testing.assert_array_equal(updates, np.full(2, -0.025, np.float16))
