"""Equinox models as parameters, over epochs with a short last window, against the large
batch in float64.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
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
    wide,
)

eqx = pytest.importorskip("equinox", reason="equinox is not installed")


@pytest.fixture(autouse=True)
def _wide() -> Iterator[None]:
    with wide():
        yield


def model_of(seed: int = 0) -> Any:
    return eqx.nn.MLP(
        FEATURES,
        1,
        3,
        1,
        activation=jnp.tanh,
        key=jax.random.key(seed),
        dtype=jnp.float64,
    )


def loss(model: Any, x: Any, y: Any) -> Any:
    return jnp.mean((jax.vmap(model)(x) - y) ** 2)


def arrays(model: Any) -> Any:
    return eqx.filter(model, eqx.is_inexact_array)


def step_of(tx: Any) -> Any:
    @eqx.filter_jit
    def step(model: Any, state: Any, x: Any, y: Any) -> Any:
        value, grads = eqx.filter_value_and_grad(loss)(model, x, y)
        weight = (
            {"weight": x.shape[0]}
            if isinstance(state, gradaccum_jax.AccumulationState)
            else {}
        )
        updates, state = tx.update(grads, state, arrays(model), **weight)
        return eqx.apply_updates(model, updates), state, value

    return step


def run(tx: Any, batches: Any, model: Any, state: Any) -> Any:
    step = step_of(tx)
    for x, y in batches:
        model, state, _ = step(model, state, x, y)
    return model, state


def test_epochs_equal_the_large_batch() -> None:
    inner = optax.adamw(0.05)
    tx, model, bare = gradaccum.wrap(inner, steps=STEPS), model_of(), model_of()
    state, held = tx.init(arrays(model)), inner.init(arrays(bare))
    for _ in range(EPOCHS):
        model, state = run(tx, MICRO_BATCHES, model, state)
        updates, state = eqx.filter_jit(gradaccum_jax.flush)(tx, state, arrays(model))
        model = eqx.apply_updates(model, updates)
        bare, held = run(inner, LARGE_BATCHES, bare, held)
    assert_close(arrays(model), arrays(bare))
    assert state.optimizer_step == EPOCHS * len(LARGE_BATCHES)


def test_frozen_part_stays() -> None:
    """`eqx.partition` puts None in the place of what is frozen, in parameters and
    gradients alike.
    """
    inner, model = optax.adamw(0.05), model_of()
    spec = eqx.tree_at(
        lambda tree: tree.layers[1],
        jax.tree.map(lambda _: False, model),
        jax.tree.map(eqx.is_inexact_array, model.layers[1]),
    )
    trained, frozen = eqx.partition(model, spec)

    def part_loss(trained: Any, x: Any, y: Any) -> Any:
        return loss(eqx.combine(trained, frozen), x, y)

    def moved(tx: Any, batches: Any) -> Any:
        part, state = trained, tx.init(trained)
        for x, y in batches:
            updates, state = tx.update(
                eqx.filter_jit(eqx.filter_grad(part_loss))(part, x, y), state, part
            )
            part = eqx.apply_updates(part, updates)
        return eqx.combine(part, frozen)

    ours, theirs = (
        moved(gradaccum.wrap(inner, steps=STEPS), MICRO_BATCHES[:STEPS]),
        moved(inner, LARGE_BATCHES[:1]),
    )
    assert_close(arrays(ours), arrays(theirs))
    assert_bitwise(arrays(ours.layers[0]), arrays(model.layers[0]))
    assert (ours.layers[1].weight != model.layers[1].weight).all()


def test_saved_in_mid_window() -> None:
    """`eqx.tree_serialise_leaves` of model and state: the resumed run has the bits of
    the uninterrupted one.
    """
    tx = gradaccum.wrap(optax.adamw(0.05), steps=STEPS)
    start = model_of(), tx.init(arrays(model_of()))
    model, state = run(tx, MICRO_BATCHES[:4], *start)
    assert state.micro_step == 1
    file = io.BytesIO()
    eqx.tree_serialise_leaves(file, (model, state))
    file.seek(0)
    model, state = eqx.tree_deserialise_leaves(file, (model_of(1), start[1]))
    state = gradaccum_jax.check_state(tx, state, arrays(model))
    resumed, whole = (
        run(tx, MICRO_BATCHES[4:7], model, state),
        run(tx, MICRO_BATCHES[:7], *start),
    )
    assert_bitwise(jax.tree.map(jnp.asarray, arrays(resumed[0])), arrays(whole[0]))
    assert_bitwise(resumed[1], whole[1])


def test_model_as_parameters() -> None:
    """The whole model, activations and all, in place of its arrays."""
    model, tx = model_of(), gradaccum.wrap(optax.sgd(0.1), steps=1)
    grads = eqx.filter_grad(loss)(model, *MICRO_BATCHES[0])
    updates, state = tx.update(grads, tx.init(arrays(model)), model)
    assert_close(updates.layers[0].weight, -0.1 * grads.layers[0].weight)
    assert gradaccum_jax.result(state).applied
