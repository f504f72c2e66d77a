"""Losses that compare items across the batch: exact in two passes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import gradaccum_jax

from .jax_large_batch import close, in_float64, numbers  # noqa: F401

PARAMS = {"w": numbers(5, 8), "v": numbers(8, 4), "temperature": np.asarray(0.7)}
X = numbers(12, 5)


def tower(params: Any, x: Any, key: Any = None) -> Any:
    hidden = jnp.tanh(x @ params["w"])
    if key is not None:
        hidden = hidden * jax.random.bernoulli(key, 0.7, hidden.shape) / 0.7
    return hidden @ params["v"]


def contrast(params: Any, z: Any) -> Any:
    logits = z @ z.T * jnp.exp(params["temperature"])
    return -jnp.mean(jnp.diag(jax.nn.log_softmax(logits)))


def whole(params: Any, outputs: Any = tower, loss: Any = contrast) -> Any:
    """The large batch's loss and gradient."""
    return jax.value_and_grad(lambda params: loss(params, outputs(params, X)))(params)


def test_integers_among_outputs() -> None:
    """The load balancing of Switch Transformer over the global batch (Fedus et al., 2022,
    equation 4): the expert of each item is an integer, which gets no gradient. Both
    functions read the temperature.
    """

    def experts(params, x):
        shares = jax.nn.softmax(tower(params, x) * jnp.exp(params["temperature"]))
        return shares, jnp.argmax(shares, axis=-1)

    def balance(params, outputs):
        shares, chosen = outputs
        routed = jnp.mean(jax.nn.one_hot(chosen, 4), axis=0)
        return 4 * jnp.sum(routed * shares.mean(0)) * params["temperature"]

    step = gradaccum_jax.coupled_value_and_grad(experts, balance, micro_batch_size=5)
    close(step(PARAMS, X), whole(PARAMS, experts, balance))


def test_dropout_is_replayed() -> None:
    """Micro-batch i drops by fold_in(key, i) in both passes."""
    key = jax.random.key(3)

    def by_hand(params, x):
        parts = [
            tower(params, x[5 * i : 5 * i + 5], jax.random.fold_in(key, i))
            for i in range(3)
        ]
        return jnp.concatenate(parts)

    step = gradaccum_jax.coupled_value_and_grad(tower, contrast, micro_batch_size=5)
    close(step(PARAMS, X, key), whole(PARAMS, by_hand))


def test_memory_is_one_micro_batch() -> None:
    """The scratch of a wide hidden layer: the same for 4 micro-batches and for 16."""
    step = gradaccum_jax.coupled_value_and_grad(
        tower, lambda params, z: jnp.std(z), micro_batch_size=16
    )
    shapes = {"w": (8, 4096), "v": (4096, 2), "x64": (64, 8), "x256": (256, 8)}
    given = {
        name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()
    }
    few = given.pop("x64")
    many = given.pop("x256")

    def scratch(x):
        memory = jax.jit(step).lower(given, x).compile().memory_analysis()
        return int(memory.temp_size_in_bytes)

    hidden = 16 * 4096 * 4
    assert scratch(many) - scratch(few) < 192 * 8 * 4 + 2**12 < hidden
