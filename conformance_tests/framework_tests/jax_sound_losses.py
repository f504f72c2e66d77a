"""Small losses in JAX for which accumulation is right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .jax_losses import (
    CLASSES,
    ITEMS,
    KEY,
    MASK,
    PARAMS,
    SEQUENCES,
    TOKEN_LABELS,
    WIDTH,
    Case,
    X,
    Y,
    dropped,
    hidden,
    plain,
    squares,
)


def attention(params: Any, x: Any, mask: Any) -> Any:
    """With padding masked out, and a mean per sequence."""
    q, k = x @ params["w"], jnp.sin(x) @ params["w"]
    weights = jax.nn.softmax(
        jnp.where(mask[:, None, :], q @ k.swapaxes(1, 2), -jnp.inf)
    )
    each = ((weights @ k) @ params["v"]) ** 2
    return jnp.mean(jnp.sum(each * mask, 1) / mask.sum(1))


def tied(params: Any, tokens: Any) -> Any:
    """One matrix as the embedding and as the output; padding rows are looked up too."""
    h = jnp.tanh(params["w"].T[jnp.maximum(tokens, 0)])
    return jnp.mean(jax.nn.logsumexp(h @ params["w"], -1))


def recurrent(params: Any, x: Any, y: Any) -> Any:
    def step(h: Any, each: Any) -> Any:
        return jnp.tanh(each @ params["w"] + h * params["v"]), None

    h, _ = jax.lax.scan(step, jnp.zeros((x.shape[0], CLASSES)), x.swapaxes(0, 1))
    return squares(params, h, y).mean()


def keys_per_item(params: Any, x: Any, y: Any, keys: Any) -> Any:
    return squares(params, jax.vmap(dropped)(hidden(params, x), keys), y).mean()


@jax.checkpoint
def rematerialised(params: Any, x: Any, y: Any, keys: Any) -> Any:
    return keys_per_item(params, x, y, keys)


def per_item_vmap(params: Any, x: Any, y: Any) -> Any:
    return jax.vmap(
        lambda one, target: squares(params, jax.nn.relu(one @ params["w"]), target)
    )(x, y).mean()


def frozen(params: Any, x: Any, y: Any) -> Any:
    """One parameter never gets a gradient."""
    return plain({**params, "v": jax.lax.stop_gradient(params["v"])}, x, y)


def random_features(params: Any, x: Any, y: Any) -> Any:
    """One fixed projection for all items."""
    return squares(
        params, jnp.cos(x @ jax.random.normal(jax.random.key(5), (WIDTH, CLASSES))), y
    ).mean()


def columns_first(params: Any, x: Any, y: Any, step: Any) -> Any:
    return plain(params, x.T, y) * (1 + 0.1 * step)


@jax.custom_vjp
def listening(x: Any) -> Any:
    return x**2


listening.defvjp(lambda x: (x**2, x), lambda x, cotangent: (2 * x * cotangent,))


def of(change: Callable[[jax.Array], jax.Array]) -> Any:
    return jax.tree.map(change, PARAMS)


HALF = of(lambda leaf: leaf.astype(jnp.bfloat16))

SOUND = {
    "bfloat16": Case(
        plain, (X.astype(jnp.bfloat16), Y.astype(jnp.bfloat16)), params=HALF
    ),
    "attention": Case(attention, (SEQUENCES, MASK)),
    "tied": Case(tied, (TOKEN_LABELS,)),
    "recurrent": Case(recurrent, (SEQUENCES, Y)),
    "keys_per_item": Case(keys_per_item, (X, Y, jax.random.split(KEY, ITEMS))),
    "rematerialised": Case(rematerialised, (X, Y, jax.random.split(KEY, ITEMS))),
    "per_item_vmap": Case(per_item_vmap, (X, Y)),
    "frozen": Case(frozen, (X, Y)),
    "random_features": Case(random_features, (X, Y)),
    "columns_first": Case(columns_first, (X.T, Y, 3), {"axes": (1, 0, None)}),
    "listening": Case(
        lambda p, x, y: listening(hidden(p, x) @ p["v"] - y).mean(), (X, Y)
    ),
    "numpy_parameters": Case(
        plain, (np.asarray(X), np.asarray(Y)), params=of(np.asarray)
    ),
}
