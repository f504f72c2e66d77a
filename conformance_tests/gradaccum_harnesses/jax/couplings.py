"""The suite's losses that couple the items of a batch, in JAX functions;
`gradaccum_conformance.couplings` defines them.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from gradaccum_conformance import Coupling

Loss = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
"""Of all left outputs, all right ones and the temperature."""


def contrast(left: jax.Array, right: jax.Array, temperature: jax.Array) -> jax.Array:
    scores = jnp.exp(temperature) * left @ right.T
    return jnp.mean(
        optax.softmax_cross_entropy_with_integer_labels(scores, jnp.arange(len(left)))
    )


def covariance(left: jax.Array, right: jax.Array, temperature: jax.Array) -> jax.Array:
    centred = left - left.mean(0)
    c = centred.T @ centred / (len(left) - 1)
    off = c - jnp.diag(jnp.diag(c))
    return jnp.exp(temperature) * jnp.sum(jnp.square(off)) / left.shape[1]


def balance(left: jax.Array, right: jax.Array, temperature: jax.Array) -> jax.Array:
    experts = left.shape[1]
    fraction = jax.nn.one_hot(left.argmax(1), experts, dtype=left.dtype).mean(0)
    return (
        jnp.exp(temperature)
        * experts
        * jnp.sum(fraction * jax.nn.softmax(left, axis=1).mean(0))
    )


COUPLINGS: dict[Coupling, Loss] = {
    "contrast": contrast,
    "covariance": covariance,
    "balance": balance,
}
