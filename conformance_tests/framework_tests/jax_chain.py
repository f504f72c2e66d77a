"""A chain of layers with two dropouts each, whose activations are far larger than its
inputs: what tests of recomputation run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

WIDTH, DEPTH = 16, 3


def layer(weights: Any, x: Any, key: Any) -> Any:
    """A residual layer: dropout, normalisation, GELU, a second dropout."""
    first, second = jax.random.split(key)
    hidden = dropped(jnp.tanh(x @ weights["in"] + weights["bias"]), first, 0.8)
    hidden = (hidden - hidden.mean(-1, keepdims=True)) * jax.lax.rsqrt(
        hidden.var(-1, keepdims=True) + 1e-3
    )
    return x + dropped(jax.nn.gelu(hidden @ weights["out"]), second, 0.5)


def dropped(x: Any, key: Any, keep: float) -> Any:
    return jnp.where(jax.random.bernoulli(key, keep, x.shape), x / keep, 0).astype(
        x.dtype
    )


def weights(dtype: Any = jnp.float32, depth: int = DEPTH) -> list[Any]:
    """The weights of every layer."""
    drawn = np.random.default_rng(0).normal(size=(depth, 2, WIDTH, WIDTH)) / WIDTH**0.5
    return [
        {
            "in": jnp.asarray(a, dtype),
            "out": jnp.asarray(b, dtype),
            "bias": jnp.zeros(WIDTH, dtype),
        }
        for a, b in drawn
    ]


def inputs(items: int = 8, dtype: Any = jnp.float32) -> Any:
    return jnp.asarray(np.random.default_rng(1).normal(size=(items, WIDTH)), dtype)


def loss(
    weights: Any,
    x: Any,
    key: Any,
    wrap: Callable[[Any], Any] = lambda function: function,
) -> Any:
    """The chain's loss, with every layer in `wrap`."""
    for index, one in enumerate(weights):
        x = wrap(layer)(one, x, jax.random.fold_in(key, index))
    return jnp.mean(jnp.square(x.astype(jnp.float32)))


def chain_loss(weights: Any, x: Any, key: Any, chain: Callable[[Any], Any]) -> Any:
    """The same loss, with `chain` given all layers at once."""
    layers = [
        lambda x, one=one, index=index: layer(one, x, jax.random.fold_in(key, index))
        for index, one in enumerate(weights)
    ]
    return jnp.mean(jnp.square(chain(layers)(x).astype(jnp.float32)))


def gradient(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """The compiled loss and gradient of a function's first argument."""
    program = (
        jax.jit(jax.value_and_grad(function))
        .lower(*arguments)
        .compile(compiler_options=options or None)
    )
    return program(*arguments)


def temporary_bytes(function: Callable[..., Any], *arguments: Any) -> int:
    """The temporary memory of a compiled gradient."""
    stats = jax.jit(jax.grad(function)).lower(*arguments).compile().memory_analysis()
    assert stats is not None
    return int(stats.temp_size_in_bytes)


def assert_same_bits(found: Any, expected: Any) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, found, expected)
