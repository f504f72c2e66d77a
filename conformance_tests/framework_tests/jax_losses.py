"""Small losses in JAX for `verify`, with their data and parameters.

A case is ``(loss_fn, params, batch, options)``; a planted one has the kind of the cause
and a word of where it is, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

RNG = np.random.default_rng(0)
ITEMS, TOKENS, WIDTH, CLASSES = 12, 6, 5, 4


def normal(*shape: int, dtype: Any = jnp.float32) -> jax.Array:
    return jnp.asarray(RNG.normal(size=shape), dtype)


X, Y = normal(ITEMS, WIDTH), normal(ITEMS)
SEQUENCES = normal(ITEMS, TOKENS, WIDTH)
LENGTHS = np.asarray([1, 6, 2, 5, 3, 4, 6, 1, 1, 5, 6, 2])
MASK = jnp.asarray(np.arange(TOKENS) < LENGTHS[:, None])
TOKEN_LABELS = jnp.asarray(
    np.where(MASK, RNG.integers(0, CLASSES, (ITEMS, TOKENS)), -100)
)
PARAMS = {"w": normal(WIDTH, CLASSES), "v": normal(CLASSES), "scale": jnp.asarray(0.5)}
KEY = jax.random.key(3)


class Case(NamedTuple):
    loss_fn: Callable[..., Any]
    batch: tuple[Any, ...]
    options: Mapping[str, Any] = MappingProxyType({})
    params: Any = PARAMS
    kind: str = ""
    where: str = ""


def hidden(params: Any, x: Any) -> Any:
    return jnp.tanh(x @ params["w"])


def squares(params: Any, h: Any, y: Any) -> Any:
    return (h @ params["v"] - y) ** 2


def plain(params: Any, x: Any, y: Any) -> Any:
    return squares(params, hidden(params, x), y).mean()


def dropped(h: Any, key: Any) -> Any:
    return jnp.where(jax.random.bernoulli(key, 0.5, h.shape), h / 0.5, 0)
