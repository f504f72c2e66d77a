"""The other outputs of a loss function: each leaf merges as the user declares, to what the large batch gives."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

pytest.importorskip("optax", reason="optax is not installed")
import jax.numpy as jnp

import gradaccum_jax
from conformance_tests.framework_tests.jax_large_batch import close, float64

TOKENS = np.array([3, 1, 4, 1, 5, 9, 2, 6, 5, 3])


@pytest.fixture(autouse=True)
def wide() -> Iterator[None]:
    with float64():
        yield


def test_aux_merges_by_declaration() -> None:
    """Ten items in micro-batches of 4, 4 and 2; every kind against the large batch's own."""
    x = np.arange(10.0) - 20
    kinds = {"sum": "sum", "mean": ("mean", "mean"), "weighted": "weighted_mean", "max": "max", "min": "min", "rows": "concatenate"}

    def loss(params: Any, x: Any, tokens: Any) -> Any:
        aux = {
            "sum": {"x": jnp.sum(x), "flag": jnp.all(x < -12)},
            "mean": (jnp.mean(x), x.shape[0]),
            "weighted": jnp.sum(x * tokens) / jnp.sum(tokens),
            "max": [jnp.max(x), jnp.max(-tokens), jnp.any(x == -20)],
            "min": [jnp.min(-x), jnp.min(tokens), jnp.all(x < -12)],
            "rows": (jnp.stack([x, x**2], axis=1),),
        }
        return params * jnp.sum(x * tokens) / jnp.sum(tokens), aux

    step = gradaccum_jax.value_and_grad(loss, has_aux=True, aux=kinds, micro_batch_size=4, weight=TOKENS)
    (_, aux), _ = step(jnp.ones(()), x, TOKENS)
    assert (aux["sum"]["x"], aux["sum"]["flag"]) == (x.sum(), 2)
    close(aux["mean"][0], np.float64(x.mean()))
    close(aux["mean"][1], np.float64((4 * 4 + 4 * 4 + 2 * 2) / 10))
    close(aux["weighted"], np.float64((x * TOKENS).sum() / TOKENS.sum()))
    assert [leaf.item() for leaf in aux["max"]] == [-11, -1, True]
    assert [leaf.item() for leaf in aux["min"]] == [11, 1, False]
    np.testing.assert_array_equal(aux["rows"][0], np.stack([x, x**2], axis=1))
