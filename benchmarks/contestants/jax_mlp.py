"""The model that JAX's streaming questions train, and a window of it in one compiled
step per micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import gradaccum_jax

STEPS = 8
"""Micro-batches in a window."""
ITEMS = 8
"""Items in a micro-batch: few, so that what is done to the gradients shows beside what
makes them.
"""
MATRICES = 4

Gradient = Callable[[Any, Any, Any], Any]
"""``gradient(params, x, state)``: of the parameters, by the optimizer's state where the
loss is scaled.
"""
Window = Callable[[], Any]
"""Trains on one window, waits and returns the parameters."""


class Compiled(NamedTuple):
    """A step ``(params, state, x) -> (params, state)`` with its first arguments;
    donated.
    """

    step: Any
    params: Any
    state: Any


def make_params(width: int) -> list[Any]:
    """`MATRICES` of shape (width, width), always the same."""
    return [
        jax.random.normal(key, (width, width)) / width**0.5
        for key in jax.random.split(jax.random.key(0), MATRICES)
    ]


def batches(width: int) -> list[Any]:
    """The window's micro-batches, each of shape (ITEMS, width)."""
    return list(jax.random.normal(jax.random.key(1), (STEPS, ITEMS, width)))


def adamw() -> Any:
    return optax.adamw(1e-4)


def loss(params: Any, x: Any) -> Any:
    """Mean square of what a tanh network makes of `x`, of shape (items, width)."""
    for w in params:
        x = jnp.tanh(x @ w)
    return jnp.mean(x * x)


def gradient(params: Any, x: Any, state: Any = None) -> Any:
    """Of the loss; the optimizer's `state` takes no part."""
    return jax.grad(loss)(params, x)


def scaled_gradient(params: Any, x: Any, state: Any) -> Any:
    """Of the loss times the scale in `state`."""
    return jax.grad(lambda params: gradaccum_jax.scale_loss(loss(params, x), state))(
        params
    )


def compile_step(
    tx: Any, params: Any, x: Any, gradient_of: Gradient = gradient
) -> Compiled:
    """The step that a user writes for `tx`, a transformation, compiled."""

    def step(params: Any, state: Any, x: Any) -> tuple[Any, Any]:
        updates, state = tx.update(gradient_of(params, x, state), state, params)
        return optax.apply_updates(params, updates), state

    state = tx.init(params)
    return Compiled(
        jax.jit(step, donate_argnums=(0, 1)).lower(params, state, x).compile(),
        params,
        state,
    )


def window(compiled: Compiled, xs: list[Any]) -> Window:
    """One call of the step for each of `xs`."""
    carried: list[Any] = [compiled.params, compiled.state]

    def run() -> Any:
        for x in xs:
            carried[:] = compiled.step(*carried, x)
        return wait(carried)[0]

    return run


def wait(tree: Any) -> Any:
    """`tree` when it is there."""
    return jax.block_until_ready(tree)  # type: ignore[no-untyped-call]
