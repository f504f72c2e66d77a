"""Models of flax, haiku and equinox: epochs with a short last window against the large
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
Trained = tuple[Callable[..., Any], Any, Any, Any]
"""The loss of the parameters, those at the start and at the end, and the state."""


@pytest.fixture(autouse=True)
def _wide() -> Iterator[None]:
    with wide():
        yield


def by_linen() -> Trained:
    """`TrainState.step` counts micro-batches. `apply_gradients` hands no extra arguments
    on, so a step that weighs its items calls the optimizer itself.
    """
    linen, states = needs("flax.linen"), needs("flax.training.train_state")
    dense = partial(linen.Dense, param_dtype=float)
    net = linen.Sequential([dense(3), jnp.tanh, dense(1)])
    params = net.init(jax.random.key(0), jnp.ones((1, FEATURES)))["params"]

    def loss(params: Any, x: Any, y: Any) -> Any:
        return jnp.mean((net.apply({"params": params}, x) - y) ** 2)

    def moved(state: Any, updates: Any, opt_state: Any) -> Any:
        params = optax.apply_updates(state.params, updates)
        return state.replace(step=state.step + 1, params=params, opt_state=opt_state)

    @jax.jit
    def step(state: Any, x: Any, y: Any) -> Any:
        given = jax.grad(loss)(state.params, x, y), state.opt_state, state.params
        return moved(state, *state.tx.update(*given, weight=x.shape[0]))

    state = states.TrainState.create(apply_fn=None, params=params, tx=TX)
    for _ in range(EPOCHS):
        for x, y in MICRO_BATCHES:
            state = step(state, x, y)
        state = moved(state, *gradaccum_jax.flush(TX, state.opt_state, state.params))
    return loss, params, state.params, state.opt_state


def by_tree(start: Any, apply: Callable[..., Any]) -> Trained:
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
    return loss, start, params, state


def by_haiku() -> Trained:
    """Two levels of dicts, whose names hold slashes."""
    hk = needs("haiku")
    net = hk.without_apply_rng(hk.transform(lambda x: hk.nets.MLP([3, 1])(x)))
    params = net.init(jax.random.key(0), jnp.ones((1, FEATURES)))
    return by_tree(params, net.apply)


def by_equinox() -> Trained:
    """The parameters are the arrays of the model."""
    eqx = needs("equinox")
    model = eqx.nn.MLP(FEATURES, 1, 3, 1, key=jax.random.key(0), dtype=jnp.float64)
    arrays, rest = eqx.partition(model, eqx.is_inexact_array)
    return by_tree(arrays, lambda arrays, x: jax.vmap(eqx.combine(arrays, rest))(x))


CASES: dict[str, Callable[[], Trained]] = {
    "linen": by_linen,
    "haiku": by_haiku,
    "equinox": by_equinox,
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_epochs_equal_the_large_batch(case: Callable[[], Trained]) -> None:
    loss, start, params, state = case()
    assert_close(params, large_batch_run(loss, start, INNER))
    assert state.optimizer_step == EPOCHS * len(LARGE_BATCHES)
