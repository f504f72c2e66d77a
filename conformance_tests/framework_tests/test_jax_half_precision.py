"""Half-precision parameters: float32 gradients reach the inner optimizer in float32."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradaccum
import gradaccum_jax

CASES = {
    "float16_tiny": (optax.adam(0.05), jnp.float16, 1e-8),
    "float16_large": (optax.adam(0.1), jnp.float16, 1e5),
}


@pytest.mark.parametrize("case", CASES)
def test_inner_optimizer_gets_wider_dtype(case: str) -> None:
    inner, dtype, value = CASES[case]
    params = jnp.ones(2, dtype)
    gradient = jnp.full(2, value, jnp.float32)
    expected, _ = inner.update(gradient, inner.init(params), params)
    tx = gradaccum.wrap(inner, steps=2)
    state = start = tx.init(params)
    for _ in range(2):
        updates, state = tx.update(gradient, state, params)
    assert gradaccum_jax.result(state).applied
    assert updates.dtype == expected.dtype == jnp.float32
    np.testing.assert_allclose(updates, expected, rtol=1e-6)
    assert jax.tree.map(jax.typeof, state) == jax.tree.map(jax.typeof, start)
