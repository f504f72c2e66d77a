"""Watching a JAX loop: from inside compiled code by JAX's own callback, and in a line."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

import gradaccum
import gradaccum_jax

WEIGHT = jnp.array([1.0, -1.0])
BAD = WEIGHT * jnp.inf


def test_from_inside_a_scan() -> None:
    """Called in the order of the steps, at closed windows only; a skipped one is heard
    too.
    """
    tx = gradaccum.wrap(
        optax.sgd(0.1), steps=2, loss_scale=gradaccum.DynamicLossScale(init_scale=8.0)
    )
    heard: list[gradaccum.StepResult] = []

    @jax.jit
    def run(state: Any, gradients: Any) -> Any:
        def step(state: Any, gradient: Any) -> Any:
            state = tx.update(gradient, state, WEIGHT)[1]
            result = gradaccum_jax.result(state)
            jax.lax.cond(
                result.closed,
                lambda: jax.debug.callback(heard.append, result, ordered=True),
                lambda: None,
            )
            return state, None

        return jax.lax.scan(step, state, gradients)[0]

    gradients = jnp.stack([WEIGHT, WEIGHT, WEIGHT, BAD, WEIGHT, WEIGHT])
    jax.block_until_ready(run(tx.init(WEIGHT), gradients))
    jax.effects_barrier()
    assert [(w.optimizer_step, w.applied, w.overflow, w.loss_scale) for w in heard] == [
        (1, True, False, 8.0),
        (1, False, True, 4.0),
        (2, True, False, 4.0),
    ]


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
