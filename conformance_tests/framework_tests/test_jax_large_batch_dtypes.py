"""Dtypes of the large batch: half precision is summed in float32 and cast once; integers and complex numbers are as in JAX."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("optax", reason="optax is not installed")
import jax
import jax.numpy as jnp

import gradaccum_jax
from conformance_tests.framework_tests.jax_large_batch import close, float64, numbers


@pytest.fixture(autouse=True)
def wide() -> Iterator[None]:
    with float64():
        yield


def test_accumulate_dtype() -> None:
    x = jnp.asarray([2.0**24] + [1.0] * 16, jnp.float32)
    step = {"loss_fn": lambda params, x: jnp.sum(params * x), "micro_batch_size": 1, "reduction": "sum"}
    narrow = gradaccum_jax.value_and_grad(**step)(jnp.ones((), jnp.float32), x)[1]
    wide = gradaccum_jax.value_and_grad(**step, accumulate_dtype="float64")(jnp.ones((), jnp.float32), x)[1]
    assert (float(narrow), float(wide)) == (2.0**24, 2.0**24 + 16)
    assert wide.dtype == jnp.float32


def test_complex_parameters() -> None:
    def loss(params: Any, x: Any) -> Any:
        return jnp.mean(jnp.abs(x @ params) ** 2)

    params = jnp.asarray(numbers(3) + 1j * numbers(3, seed=1))
    close(gradaccum_jax.value_and_grad(loss, steps=3)(params, numbers(7, 3)), jax.value_and_grad(loss)(params, numbers(7, 3)))


def test_integers_and_unused_parameters() -> None:
    """Integers have float0, as `jax.grad` gives them; what the loss does not use has zeros; None stays None."""
    params = {"w": jnp.ones(3), "n": jnp.arange(2), "unused": jnp.ones(2), "none": None}

    def loss(params: Any, x: Any) -> Any:
        return jnp.mean(x @ params["w"]) * params["n"][1]

    _, made = gradaccum_jax.value_and_grad(loss, steps=2, allow_int=True)(params, numbers(4, 3))
    _, wanted = jax.value_and_grad(loss, allow_int=True)(params, numbers(4, 3))
    assert made["n"].dtype == jax.dtypes.float0 == wanted["n"].dtype
    assert made["n"].shape == (2,)
    close({**made, "n": None}, {**wanted, "n": None})
