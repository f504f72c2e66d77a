"""Watching a JAX loop: from the host after each step, and from inside compiled code by
JAX's own callback.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import gradaccum
import gradaccum_jax
from gradaccum import ArgumentTypeError

X = jnp.arange(12.0).reshape(6, 2) / 10
WEIGHT = jnp.array([1.0, -1.0])


def loss_of(weight: Any, rows: Any) -> Any:
    return ((rows @ weight) ** 2).mean()


def step_of(tx: Any) -> Any:
    @jax.jit
    def step(weight: Any, state: Any, rows: Any) -> Any:
        loss, gradient = jax.value_and_grad(loss_of)(weight, rows)
        updates, state = tx.update(gradient, state, weight, weight=len(rows))
        return optax.apply_updates(weight, updates), state, loss

    return step


def test_from_inside_a_scan() -> None:
    """Called in the order of the steps, at closed windows only; a skipped one is heard
    too.
    """
    tx = gradaccum.wrap(
        optax.sgd(0.1), steps=2, loss_scale=gradaccum.DynamicLossScale(init_scale=8.0)
    )
    heard: list[gradaccum.StepResult] = []

    @jax.jit
    def run(weight: Any, state: Any, batches: Any) -> Any:
        def step(carry: Any, rows: Any) -> Any:
            weight, state = carry
            updates, state = tx.update(
                jax.grad(loss_of)(weight, rows) * state.loss_scale, state, weight
            )
            result = gradaccum_jax.result(state)
            jax.lax.cond(
                result.closed,
                lambda: jax.debug.callback(heard.append, result, ordered=True),
                lambda: None,
            )
            return (optax.apply_updates(weight, updates), state), None

        return jax.lax.scan(step, (weight, state), batches)[0]

    batches = jnp.stack([X[:3], X[3:], X[:3], X[3:] * math.inf, X[:3], X[3:]])
    jax.block_until_ready(run(WEIGHT, tx.init(WEIGHT), batches))
    jax.effects_barrier()
    assert [(w.optimizer_step, w.applied, w.overflow, w.loss_scale) for w in heard] == [
        (1, True, False, 8.0),
        (1, False, True, 4.0),
        (2, True, False, 4.0),
    ]


def test_describe_is_one_line() -> None:
    tx = gradaccum.wrap(
        optax.sgd(0.1),
        steps=[(0, 1), (1, 3)],
        loss_scale=gradaccum.StaticLossScale(64.0),
    )
    step = step_of(tx)
    weight, state = WEIGHT, tx.init(WEIGHT)
    assert gradaccum_jax.describe(state) == "micro-batch 0 of 1, update 0, scale 64"
    for _ in range(2):
        weight, state, _ = step(weight, state, X)
    assert (
        gradaccum_jax.describe((state, None))
        == "micro-batch 1 of 3, update 1, scale 64"
    )
    for rows in (X * math.inf, X, X):
        weight, state, _ = step(weight, state, rows)
    assert (
        gradaccum_jax.describe(state)
        == "micro-batch 1 of 3, update 1, 1 skipped, scale 64"
    )
    assert (
        gradaccum_jax.describe(gradaccum.wrap(optax.sgd(0.1), steps=None).init(WEIGHT))
        == "micro-batch 0, update 0"
    )
    by_weight = gradaccum.wrap(optax.sgd(0.1), steps=gradaccum.until_weight(9)).init(
        WEIGHT
    )
    shared = by_weight._replace(
        weight=jnp.array([1.0, 2.5]), overflow=jnp.array([False, True])
    )
    assert gradaccum_jax.describe(shared) == "micro-batch 0, weight 3.5 of 9, update 0"


def test_traced_and_stacked_are_refused() -> None:
    tx = gradaccum.wrap(optax.sgd(0.1), steps=2)
    states = jax.vmap(tx.init)(jnp.stack([WEIGHT, WEIGHT]))
    with pytest.raises(ArgumentTypeError, match="stacked"):
        gradaccum_jax.describe(states)
    with pytest.raises(ArgumentTypeError, match="traced"):
        jax.jit(gradaccum_jax.describe)(tx.init(WEIGHT))
