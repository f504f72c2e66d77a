"""Small losses in JAX, each with one published mistake planted; a case names the cause
and a word of where it is.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .jax_losses import CLASSES, ITEMS, KEY, Case, X, Y, dropped, hidden, plain, squares


def batch_norm(h: Any) -> Any:
    return (h - h.mean(0)) / jnp.sqrt(h.var(0) + 1e-5)


def normalised(params: Any, x: Any, y: Any) -> Any:
    return squares(params, jnp.tanh(batch_norm(x @ params["w"])), y).mean()


def key_in_the_loss(params: Any, x: Any, y: Any) -> Any:
    return squares(params, dropped(hidden(params, x), jax.random.key(0)), y).mean()


def key_of_the_batch(params: Any, x: Any, y: Any, key: Any) -> Any:
    return squares(params, dropped(hidden(params, x), key), y).mean()


@jax.custom_vjp
def deaf(x: Any) -> Any:
    return x**2


deaf.defvjp(lambda x: (x**2, x), lambda x, cotangent: (2 * x / ITEMS,))


def with_deaf(params: Any, x: Any, y: Any) -> Any:
    return deaf(hidden(params, x) @ params["v"] - y).mean()


def expert_capacity(params: Any, x: Any, y: Any) -> Any:
    """Only the first three items of each expert pass."""
    gates = jax.nn.softmax(x @ params["w"])
    chosen = jax.nn.one_hot(gates.argmax(-1), CLASSES)
    kept = chosen * (jnp.cumsum(chosen, axis=0) <= 3)
    return squares(params, gates * kept, y).mean()


def generator_in_the_loss(params: Any, x: Any, y: Any) -> Any:
    return plain(
        params,
        x + np.random.default_rng(0).standard_normal(x.shape).astype(np.float32),
        y,
    )


PLANTED = {
    "normalised": Case(normalised, (X, Y), kind="coupled", where="the loss"),
    "expert_capacity": Case(expert_capacity, (X, Y), kind="coupled", where="the loss"),
    "key_in_the_loss": Case(
        key_in_the_loss, (X, Y), kind="not_repeatable", where="the loss"
    ),
    "key": Case(key_of_the_batch, (X, Y, KEY), kind="not_repeatable", where="the loss"),
    "raw_key": Case(
        key_of_the_batch,
        (X, Y, jax.random.PRNGKey(0)),
        {"axes": (0, 0, "key")},
        kind="not_repeatable",
        where="the loss",
    ),
    "generator_in_the_loss": Case(
        generator_in_the_loss, (X, Y), kind="not_repeatable", where="the loss"
    ),
    "deaf": Case(with_deaf, (X, Y), kind="custom_backward", where="['v'], ['w']"),
}
