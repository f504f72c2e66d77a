"""haiku's trees, two levels of dicts whose names hold slashes: an epoch with a short
last window, and the leaf that an error names.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

pytest.importorskip("optax", reason="optax is not installed")
import jax
import jax.numpy as jnp
import optax

import gradaccum
import gradaccum_jax

from .jax_epoch import (
    EPOCHS,
    FEATURES,
    LARGE_BATCHES,
    MICRO_BATCHES,
    STEPS,
    assert_close,
    large_batch_run,
    wide,
)

RNG = np.random.default_rng(2)
SHAPES = {
    "mlp/~/linear_0": {"b": (3,), "w": (FEATURES, 3)},
    "mlp/~/linear_1": {"b": (1,), "w": (3, 1)},
}


@pytest.fixture(autouse=True)
def _wide() -> Iterator[None]:
    with wide():
        yield


def by_hand() -> tuple[Any, Any]:
    """The tree that haiku's MLP has, and the same function of it: this runs without
    haiku.
    """

    def apply(params: Any, x: Any) -> Any:
        first, second = params["mlp/~/linear_0"], params["mlp/~/linear_1"]
        return jnp.maximum(x @ first["w"] + first["b"], 0) @ second["w"] + second["b"]

    return jax.tree.map(
        lambda shape: jnp.asarray(RNG.normal(size=shape)),
        SHAPES,
        is_leaf=lambda leaf: isinstance(leaf, tuple),
    ), apply


def by_haiku() -> tuple[Any, Any]:
    hk = pytest.importorskip("haiku", reason="dm-haiku is not installed")
    net = hk.without_apply_rng(hk.transform(lambda x: hk.nets.MLP([3, 1])(x)))
    params = net.init(jax.random.key(0), jnp.ones((1, FEATURES)))
    assert jax.tree.map(jnp.shape, params) == SHAPES
    return params, net.apply


@pytest.mark.parametrize("made", [by_hand, by_haiku])
def test_epochs_equal_the_large_batch(made: Any) -> None:
    start, apply = made()
    inner = optax.adamw(
        0.05, mask=lambda params: {name: {"b": False, "w": True} for name in params}
    )
    tx = gradaccum.wrap(inner, steps=STEPS)

    def loss(params: Any, x: Any, y: Any) -> Any:
        return jnp.mean((apply(params, x) - y) ** 2)

    @jax.jit
    def step(params: Any, state: Any, x: Any, y: Any) -> Any:
        updates, state = tx.update(
            jax.grad(loss)(params, x, y), state, params, weight=x.shape[0]
        )
        return optax.apply_updates(params, updates), state

    params, state = start, tx.init(start)
    for _ in range(EPOCHS):
        for x, y in MICRO_BATCHES:
            params, state = step(params, state, x, y)
        updates, state = gradaccum_jax.flush(tx, state, params)
        params = optax.apply_updates(params, updates)
    assert_close(params, large_batch_run(loss, start, inner))
    assert state.optimizer_step == EPOCHS * len(LARGE_BATCHES)


def test_error_names_the_leaf() -> None:
    params, _ = by_hand()
    tx = gradaccum.wrap(optax.sgd(0.1), steps=STEPS)
    grads = {
        **params,
        "mlp/~/linear_0": {"b": params["mlp/~/linear_0"]["b"], "w": jnp.ones((2, 2))},
    }
    with pytest.raises(
        gradaccum.GradientError, match=r"^grads\['mlp/~/linear_0'\]\['w'\]: .*\(4, 3\)"
    ):
        tx.update(grads, tx.init(params), params)
