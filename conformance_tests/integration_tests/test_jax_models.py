"""Models of haiku and equinox: epochs with a short last window against the large
batch in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

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

needs = partial(pytest.importorskip, reason="not installed")
INNER = optax.adamw(0.05)
TX = gradaccum.wrap(INNER, steps=STEPS)
Apply = Callable[..., Any]
"""The model's output, of the parameters and the rows."""


@pytest.fixture(autouse=True)
def _wide() -> Iterator[None]:
    with wide():
        yield


def haiku() -> tuple[Any, Apply]:
    """Two levels of dicts, whose names hold slashes."""
    hk = needs("haiku")
    net = hk.without_apply_rng(hk.transform(lambda x: hk.nets.MLP([3, 1])(x)))
    return net.init(jax.random.key(0), jnp.ones((1, FEATURES))), net.apply


def equinox() -> tuple[Any, Apply]:
    """The parameters are the arrays of the model."""
    eqx = needs("equinox")
    model = eqx.nn.MLP(FEATURES, 1, 3, 1, key=jax.random.key(0), dtype=jnp.float64)
    arrays, rest = eqx.partition(model, eqx.is_inexact_array)
    return arrays, lambda arrays, x: jax.vmap(eqx.combine(arrays, rest))(x)


@pytest.mark.parametrize("make", [haiku, equinox])
def test_epochs_equal_the_large_batch(make: Callable[[], tuple[Any, Apply]]) -> None:
    start, apply = make()

    def loss(params: Any, x: Any, y: Any) -> Any:
        return jnp.mean((apply(params, x) - y) ** 2)

    @jax.jit
    def step(params: Any, state: Any, x: Any, y: Any) -> Any:
        grads = jax.grad(loss)(params, x, y)
        updates, state = TX.update(grads, state, params, weight=x.shape[0])
        return optax.apply_updates(params, updates), state

    params, state = start, TX.init(start)
    for _ in range(EPOCHS):
        for x, y in MICRO_BATCHES:
            params, state = step(params, state, x, y)
        updates, state = gradaccum_jax.flush(TX, state, params)
        params = optax.apply_updates(params, updates)
    assert_close(params, large_batch_run(loss, start, INNER))
    assert state.optimizer_step == EPOCHS * len(LARGE_BATCHES)
