"""Models of flax, haiku and equinox: epochs with a short last window against the large
batch in float64, and a state of equinox saved in mid-window.
"""

from __future__ import annotations

import io
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
    assert_bitwise,
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


def by_nnx() -> Trained:
    nnx = needs("flax.nnx")
    linear = partial(nnx.Linear, rngs=nnx.Rngs(0), param_dtype=float)
    model = nnx.Sequential(linear(FEATURES, 3), jnp.tanh, linear(3, 1))
    optimizer = nnx.Optimizer(model, TX, wrt=nnx.Param)
    graph, start = nnx.split(nnx.clone(model))

    def loss(model: Any, x: Any, y: Any) -> Any:
        return jnp.mean((model(x) - y) ** 2)

    @nnx.jit
    def step(model: Any, optimizer: Any, x: Any, y: Any) -> None:
        grads = nnx.grad(loss)(model, x, y)
        optimizer.update(model, grads, weight=x.shape[0])

    for _ in range(EPOCHS):
        for x, y in MICRO_BATCHES:
            step(model, optimizer, x, y)
        params = nnx.state(model, nnx.Param)
        updates, state = gradaccum_jax.flush(TX, optimizer.opt_state, params)
        nnx.update(model, gradaccum_jax.apply_updates(params, updates, state))
        nnx.update(optimizer.opt_state, nnx.state(state))
    result = gradaccum_jax.result(optimizer.opt_state)
    return (
        lambda params, x, y: loss(nnx.merge(graph, params), x, y),
        start,
        nnx.state(model, nnx.Param),
        result,
    )


def step_of(loss: Any) -> Any:
    @jax.jit
    def step(params: Any, state: Any, x: Any, y: Any) -> Any:
        grads = jax.grad(loss)(params, x, y)
        updates, state = TX.update(grads, state, params, weight=x.shape[0])
        return optax.apply_updates(params, updates), state

    return step


def by_tree(start: Any, apply: Callable[..., Any]) -> Trained:
    def loss(params: Any, x: Any, y: Any) -> Any:
        return jnp.mean((apply(params, x) - y) ** 2)

    params, state, step = start, TX.init(start), step_of(loss)
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


def mlp(seed: int) -> tuple[Any, Callable[..., Any]]:
    """The arrays of equinox' model, and the model as a function of them."""
    eqx = needs("equinox")
    key = jax.random.key(seed)
    model = eqx.nn.MLP(FEATURES, 1, 3, 1, key=key, dtype=jnp.float64)
    arrays, rest = eqx.partition(model, eqx.is_inexact_array)
    return arrays, lambda arrays, x: jax.vmap(eqx.combine(arrays, rest))(x)


CASES: dict[str, Callable[[], Trained]] = {
    "linen": by_linen,
    "nnx": by_nnx,
    "haiku": by_haiku,
    "equinox": lambda: by_tree(*mlp(0)),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_epochs_equal_the_large_batch(case: Callable[[], Trained]) -> None:
    loss, start, params, state = case()
    assert_close(params, large_batch_run(loss, start, INNER))
    assert state.optimizer_step == EPOCHS * len(LARGE_BATCHES)


def test_equinox_saves_in_mid_window() -> None:
    """The resumed run has the bits of the uninterrupted one."""
    eqx, file, (start, apply) = needs("equinox"), io.BytesIO(), mlp(0)
    step = step_of(lambda params, x, y: jnp.mean((apply(params, x) - y) ** 2))

    def train(carried: Any, first: int, last: int) -> Any:
        for x, y in MICRO_BATCHES[first:last]:
            carried = step(*carried, x, y)
        return carried

    begun = start, TX.init(start)
    eqx.tree_serialise_leaves(file, train(begun, 0, 4))
    file.seek(0)
    params, state = eqx.tree_deserialise_leaves(file, (mlp(1)[0], begun[1]))
    state = gradaccum_jax.check_state(TX, state, params)
    assert state.micro_step == 1
    assert_bitwise(train((params, state), 4, 7), train(begun, 0, 7))
