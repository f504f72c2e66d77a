"""flax linen's TrainState and flax nnx's optimizers over epochs with a short last
window, against the large batch in float64.
"""

from __future__ import annotations

from collections.abc import Iterator
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

train_state = pytest.importorskip(
    "flax.training.train_state", reason="flax is not installed"
)
linen = pytest.importorskip("flax.linen", reason="flax is not installed")
nnx = pytest.importorskip("flax.nnx", reason="flax is not installed")


@pytest.fixture(autouse=True)
def _wide() -> Iterator[None]:
    with wide():
        yield


class Net(linen.Module):  # type: ignore[misc, name-defined]
    @linen.compact
    def __call__(self, x: Any) -> Any:
        return linen.Dense(1, param_dtype=float)(
            jnp.tanh(linen.Dense(3, param_dtype=float)(x))
        )


def loss(params: Any, x: Any, y: Any) -> Any:
    return jnp.mean((Net().apply({"params": params}, x) - y) ** 2)


def created(tx: Any) -> Any:
    params = Net().init(jax.random.key(0), jnp.ones((1, FEATURES)))["params"]
    return train_state.TrainState.create(apply_fn=Net().apply, params=params, tx=tx)


@partial(jax.jit, donate_argnums=0)
def train(state: Any, x: Any, y: Any) -> Any:
    """`apply_gradients` hands no extra arguments to the optimizer, so the step that
    weighs its items calls it itself.
    """
    grads = jax.grad(loss)(state.params, x, y)
    updates, opt_state = state.tx.update(
        grads, state.opt_state, state.params, weight=x.shape[0]
    )
    return state.replace(
        step=state.step + 1,
        params=optax.apply_updates(state.params, updates),
        opt_state=opt_state,
    )


@partial(jax.jit, donate_argnums=0)
def flush(state: Any) -> Any:
    updates, opt_state = gradaccum_jax.flush(state.tx, state.opt_state, state.params)
    return state.replace(
        params=optax.apply_updates(state.params, updates), opt_state=opt_state
    )


def test_train_state_over_epochs() -> None:
    """`TrainState.step` counts micro-batches; the updates are counted in
    `opt_state.optimizer_step`.
    """
    inner = optax.adamw(0.05)
    state = created(gradaccum.wrap(inner, steps=STEPS))
    wanted = large_batch_run(loss, state.params, inner)
    for _ in range(EPOCHS):
        for x, y in MICRO_BATCHES:
            state = train(state, x, y)
        state = flush(state)
    assert_close(state.params, wanted)
    assert (state.step, state.opt_state.optimizer_step) == (
        EPOCHS * len(MICRO_BATCHES),
        EPOCHS * len(LARGE_BATCHES),
    )


def test_apply_gradients_equals_the_large_batch() -> None:
    inner = optax.adamw(0.05)
    state = created(gradaccum.wrap(inner, steps=STEPS))
    bare = created(inner)
    apply = jax.jit(
        lambda state, x, y: state.apply_gradients(
            grads=jax.grad(loss)(state.params, x, y)
        )
    )
    for (x, y), large in zip(
        MICRO_BATCHES[: 2 * STEPS],
        [None, None, LARGE_BATCHES[0], None, None, LARGE_BATCHES[1]],
        strict=True,
    ):
        before, state = state, apply(state, x, y)
        if large is None:
            assert_bitwise(state.params, before.params)
        else:
            bare = apply(bare, *large)
            assert_close(state.params, bare.params)


def test_schedule_of_the_step_reads_the_update_count() -> None:
    """A rate that the loop takes from `TrainState.step` would run `steps` times too
    fast; one inside the optimizer counts updates.
    """
    schedule = optax.piecewise_constant_schedule(0.1, {1: 0.1})
    inner = optax.sgd(schedule)
    state = created(gradaccum.wrap(inner, steps=STEPS))
    start = state.params
    for x, y in MICRO_BATCHES[: 2 * STEPS]:
        state = state.apply_gradients(grads=jax.grad(loss)(state.params, x, y))
    params, held = start, inner.init(start)
    for x, y in LARGE_BATCHES[:2]:
        updates, held = inner.update(jax.grad(loss)(params, x, y), held, params)
        params = optax.apply_updates(params, updates)
    assert_close(state.params, params)
    assert schedule(state.opt_state.optimizer_step - 1) == schedule(1)


class Model(nnx.Module):  # type: ignore[misc, name-defined]
    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.hidden = nnx.Linear(FEATURES, 3, rngs=rngs, param_dtype=float)
        self.out = nnx.Linear(3, 1, rngs=rngs, param_dtype=float)

    def __call__(self, x: Any) -> Any:
        return self.out(jnp.tanh(self.hidden(x)))


def nnx_loss(model: Any, x: Any, y: Any) -> Any:
    return jnp.mean((model(x) - y) ** 2)


def nnx_wanted(inner: Any) -> Any:
    graph, params = nnx.split(Model())
    return large_batch_run(
        lambda params, x, y: nnx_loss(nnx.merge(graph, params), x, y), params, inner
    )


def nnx_flush(model: Any, optimizer: Any) -> None:
    params = nnx.state(model, nnx.Param)
    updates, state = gradaccum_jax.flush(optimizer.tx, optimizer.opt_state, params)
    nnx.update(model, gradaccum_jax.apply_updates(params, updates, state))
    nnx.update(optimizer.opt_state, nnx.state(state))


@pytest.mark.parametrize("kind", ["Optimizer", "ModelAndOptimizer"])
def test_nnx_optimizers_over_epochs(kind: str) -> None:
    inner, model = optax.adamw(0.05), Model()
    optimizer = getattr(nnx, kind)(
        model, gradaccum.wrap(inner, steps=STEPS), wrt=nnx.Param
    )
    first = () if kind == "ModelAndOptimizer" else (model,)

    @nnx.jit
    def step(model: Any, optimizer: Any, x: Any, y: Any) -> None:
        grads = nnx.grad(nnx_loss)(model, x, y)
        optimizer.update(*(() if not first else (model,)), grads, weight=x.shape[0])

    for _ in range(EPOCHS):
        for x, y in MICRO_BATCHES:
            step(model, optimizer, x, y)
        nnx_flush(model, optimizer)
    assert_close(nnx.state(model, nnx.Param), nnx_wanted(inner))
    assert gradaccum_jax.result(optimizer.opt_state).optimizer_step == EPOCHS * len(
        LARGE_BATCHES
    )


def test_nnx_split_and_merged_in_a_scan() -> None:
    """The functional interface: model and optimizer are split, and scanned over the
    micro-batches of two windows.
    """
    inner, model = optax.adamw(0.05), Model()
    optimizer = nnx.Optimizer(model, gradaccum.wrap(inner, steps=STEPS), wrt=nnx.Param)
    graph, state = nnx.split((model, optimizer))
    x, y = (
        jnp.stack(leaves) for leaves in zip(*MICRO_BATCHES[: 2 * STEPS], strict=True)
    )

    def step(state: Any, batch: Any) -> Any:
        model, optimizer = nnx.merge(graph, state)
        optimizer.update(model, nnx.grad(nnx_loss)(model, *batch))
        return nnx.state((model, optimizer)), None

    state, _ = jax.jit(lambda state: jax.lax.scan(step, state, (x, y)))(state)
    nnx.update((model, optimizer), state)
    bare = Model()
    other = nnx.Optimizer(bare, inner, wrt=nnx.Param)
    for batch in LARGE_BATCHES[:2]:
        other.update(bare, nnx.grad(nnx_loss)(bare, *batch))
    assert_close(nnx.state(model, nnx.Param), nnx.state(bare, nnx.Param))
