"""Ensembles under `jax.vmap`: each member trains as if alone, whether or not the other
members end their windows too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import gradaccum

MEMBERS, MICRO_BATCHES = 3, 9
PARAMS = {
    "w": jnp.asarray(
        np.random.default_rng(0).normal(size=(MEMBERS, 2, 3)), jnp.float32
    ),
    "b": jnp.ones((MEMBERS, 2)),
}


def gradients(index: int) -> Any:
    """Those of a micro-batch. A NaN in the second member's fourth and the third's
    seventh makes their windows end apart.
    """
    grads = jax.tree.map(lambda p: p * (index + 1) - 0.5, PARAMS)
    member = {3: 1, 6: 2}.get(index)
    if member is not None:
        grads["b"] = grads["b"].at[member, 0].set(jnp.nan)
    return grads


def train(tx: Any, lift: Callable[..., Any], choose: Callable[[Any], Any]) -> list[Any]:
    """The parameters and the state after every micro-batch, of as many members as
    `choose` leaves and `lift` maps over.
    """

    def step(params: Any, state: Any, grads: Any) -> Any:
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    compiled, params = jax.jit(lift(step)), choose(PARAMS)
    carried, seen = (params, lift(tx.init)(params)), []
    for index in range(MICRO_BATCHES):
        carried = compiled(*carried, choose(gradients(index)))
        seen.append(carried)
    return seen


def member(tree: Any, index: int) -> Any:
    return jax.tree.map(lambda leaf: leaf[index], tree)


def test_members_train_as_if_alone() -> None:
    """But for the last bits: XLA sums the norm of a batch in another order."""
    tx = gradaccum.wrap(
        optax.sgd(0.5, momentum=0.5),
        steps=[(0, 1), (2, 3)],
        clip_norm=0.5,
        on_overflow="drop_micro_batch",
    )
    together = train(tx, jax.vmap, lambda tree: tree)
    for index in range(MEMBERS):
        alone = train(tx, lambda f: f, lambda tree, index=index: member(tree, index))
        jax.tree.map(
            lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-7),
            member(together, index),
            alone,
        )
