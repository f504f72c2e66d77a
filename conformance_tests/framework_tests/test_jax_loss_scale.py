"""Loss scaling in JAX: a derivative that float16 cannot hold survives under a scale,
also where JAX's float64 is on; complex sums.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradaccum
import gradaccum_jax
from conformance_tests.framework_tests.jax_large_batch import float64


@pytest.mark.parametrize("wide", [False, True], ids=["x32", "x64"])
@pytest.mark.parametrize("master_weights", [False, True])
def test_scaled_float16_autograd(wide: bool, master_weights: bool) -> None:
    """A derivative of 2^-26 is 0 in float16. Under a scale of 2^12 it survives."""
    with float64(wide):
        params = {"w": jnp.asarray([1.0, 2.0], jnp.float16)}
        x = jnp.asarray([2.0**-13, 2.0**-13], jnp.float16)
        tx = gradaccum.wrap(
            optax.sgd(1.0), steps=2, loss_scale=2.0**12, master_weights=master_weights
        )
        state = tx.init(params)
        assert gradaccum_jax.scale_loss(jnp.float16(2.0), state).dtype == jnp.float32

        def loss(p: Any, scale: Any) -> Any:
            product = jnp.mean(p["w"] * x) * jnp.float16(2.0**-12)
            return scale(product)

        assert not np.any(jax.grad(loss)(params, lambda value: value)["w"])
        for _ in range(2):
            grads = jax.grad(loss)(
                params,
                lambda value: gradaccum_jax.scale_loss(value, state),  # noqa: B023
            )
            assert grads["w"].dtype == jnp.float16
            np.testing.assert_array_equal(grads["w"], np.float16(2.0**-14))
            updates, state = tx.update(grads, state, params)
        assert state.loss_scale.dtype == jnp.float32
        assert gradaccum_jax.result(state).grad_norm == pytest.approx(2**0.5 * 2.0**-26)
        expected = -(2.0**-26) if master_weights else np.float16(-(2.0**-26))
        moved = (
            state.masters["w"] - np.asarray([1.0, 2.0], np.float32)
            if master_weights
            else updates["w"]
        )
        np.testing.assert_array_equal(
            moved,
            np.float32([1, 2]) + np.float32(expected) - np.float32([1, 2])
            if master_weights
            else expected,
        )


def test_complex128_parameters_in_complex64_sums() -> None:
    with float64():
        tx = gradaccum.wrap(optax.sgd(1.0), steps=2, accumulate_dtype="float32")
        params = jnp.asarray([1.0 + 2.0j, 3.0])
        state = tx.init(params)
        assert state.accumulator.dtype == jnp.complex64
        for _ in range(2):
            updates, state = tx.update(params, state, params)
        np.testing.assert_array_equal(updates, -params)
        with pytest.raises(gradaccum.GradientError, match="complex128"):
            gradaccum.wrap(optax.sgd(1.0), steps=2).update(
                params, gradaccum.wrap(optax.sgd(1.0), steps=2).init(params.real)
            )
