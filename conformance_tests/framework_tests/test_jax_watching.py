"""Watching a JAX loop: from inside compiled code by JAX's own callback, and in a line."""

from __future__ import annotations

import jax.numpy as jnp
import optax

import gradaccum
import gradaccum_jax

WEIGHT = jnp.array([1.0, -1.0])
BAD = WEIGHT * jnp.inf


def test_describe_is_one_line() -> None:
    tx = gradaccum.wrap(optax.sgd(0.1), steps=[(0, 1), (1, 3)], loss_scale=64.0)
    state, said = tx.init(WEIGHT), []
    for gradient in (WEIGHT, WEIGHT, BAD, WEIGHT, WEIGHT):
        said.append(gradaccum_jax.describe((state, None)))
        _, state = tx.update(gradient, state, WEIGHT)
    assert said[0] == "micro-batch 0 of 1, update 0, scale 64"
    assert said[2] == "micro-batch 1 of 3, update 1, scale 64"
    assert (
        gradaccum_jax.describe(state)
        == "micro-batch 1 of 3, update 1, 1 skipped, scale 64"
    )
    whole = gradaccum.wrap(optax.sgd(0.1), steps=None).init(WEIGHT)
    assert gradaccum_jax.describe(whole) == "micro-batch 0, update 0"
    by_weight = gradaccum.wrap(optax.sgd(0.1), steps=gradaccum.until_weight(9))
    shared = by_weight.init(WEIGHT)._replace(
        weight=jnp.array([1.0, 2.5]), overflow=jnp.array([False, True])
    )
    assert gradaccum_jax.describe(shared) == "micro-batch 0, weight 3.5 of 9, update 0"
