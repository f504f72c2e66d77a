"""The wrapper beside and inside the combinators of optax, with models of haiku and
equinox, in flax's `TrainState` and beside jmp's loss scale: where it belongs, and what counts micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

pytest.importorskip("optax")
import jax
import jax.numpy as jnp
import optax

import gradaccum
import gradaccum_jax
from conformance_tests.framework_tests.jax_comparison import (
    assert_bitwise,
    assert_close,
    wide,
)

STEPS = 2
PARAMS = {"w": jnp.asarray([1.0, -2.0, 4.0]), "b": jnp.asarray([0.5])}
GRADS = [jax.tree.map(lambda p, i=i: p / 4 + i, PARAMS) for i in range(8)]
"""Multiples of 1/8: the mean of two is exact, and so the wrapped run has the bare run's
bits.
"""
MEANS = [
    jax.tree.map(lambda a, b: (a + b) / 2, *GRADS[i : i + 2]) for i in range(0, 8, 2)
]
INNER = optax.sgd(0.5, momentum=0.5)


def train(
    tx: Any, grads: Any, params: Any = PARAMS, state: Any = None
) -> tuple[Any, Any]:
    state = tx.init(params) if state is None else state
    update = jax.jit(tx.update)
    for gradient in grads:
        updates, state = update(gradient, state, params)
        params = optax.apply_updates(params, updates)
    return params, state


def wrap(inner: Any, **options: Any) -> Any:
    return gradaccum.wrap(inner, **{"steps": STEPS, **options})


def test_injected_rate_is_seen_and_set_in_mid_window() -> None:
    """The rate that stands in the state at the window's end is the one that the
    window's update has.
    """
    tx = wrap(optax.inject_hyperparams(optax.sgd)(learning_rate=0.5))
    _, state = train(tx, GRADS[:1])
    assert state.inner_state.hyperparams["learning_rate"] == 0.5
    changed = optax.tree.set(state, learning_rate=jnp.asarray(0.25))
    moved, after = train(tx, GRADS[1:2], state=changed)
    assert_bitwise(moved, jax.tree.map(lambda p, g: p - 0.25 * g, PARAMS, MEANS[0]))
    assert after.inner_state.hyperparams["learning_rate"] == 0.25


def test_apply_if_finite() -> None:
    """Inside it sees finite windows, as the wrapper skips the others by itself. Around
    it drops micro-batches: one that it rejects never reaches the window, which ends one
    micro-batch later.
    """
    bad = jax.tree.map(lambda g: g * jnp.nan, GRADS[1])
    finite = optax.apply_if_finite(INNER, 3)
    moved, state = train(wrap(finite), [GRADS[0], bad, *GRADS[2:4]])
    assert_bitwise(moved, train(finite, [bad, MEANS[1]])[0])
    assert state.skipped_windows == 1
    assert state.inner_state.total_notfinite == 0
    around = optax.apply_if_finite(wrap(INNER), 3)
    moved, state = train(around, [GRADS[0], bad, *GRADS[1:4]])
    assert_bitwise(moved, train(INNER, MEANS[:2])[0])
    assert state.total_notfinite == 1
    assert gradaccum_jax.result(state).optimizer_step == 2
    updates, _ = gradaccum_jax.flush(around, train(around, GRADS[:1])[1], PARAMS)
    moved = optax.apply_updates(PARAMS, updates)
    assert_bitwise(moved, train(INNER, GRADS[:1])[0])


Model = tuple[Any, Callable[..., Any]]
"""The parameters, and the output of parameters and rows."""


def haiku() -> Model:
    """Two levels of dicts, whose names hold slashes."""
    hk = pytest.importorskip("haiku")
    net = hk.without_apply_rng(hk.transform(lambda x: hk.nets.MLP([3, 1])(x)))
    return net.init(jax.random.key(0), jnp.ones((1, 4))), net.apply


def equinox() -> Model:
    """The parameters are the arrays of the model."""
    eqx = pytest.importorskip("equinox")
    model = eqx.nn.MLP(4, 1, 3, 1, key=jax.random.key(0), dtype=jnp.float64)
    arrays, rest = eqx.partition(model, eqx.is_inexact_array)
    return arrays, lambda arrays, x: jax.vmap(eqx.combine(arrays, rest))(x)


@pytest.mark.parametrize("make", [haiku, equinox])
def test_model_of_others(make: Callable[[], Model]) -> None:
    with wide():
        params, apply = make()
        x = jnp.asarray(np.random.default_rng(0).normal(size=(8, 4)))

        def gradient(x):
            return jax.grad(lambda params: jnp.mean((apply(params, x) - 1) ** 2))(
                params
            )

        inner = optax.adamw(0.05)
        parts = [gradient(part) for part in jnp.split(x, STEPS)]
        moved, state = train(wrap(inner), parts, params)
        assert_close(moved, train(inner, [gradient(x)], params)[0])
        assert state.optimizer_step == 1


def test_train_state_counts_micro_batches() -> None:
    states = pytest.importorskip("flax.training.train_state")
    state = states.TrainState.create(apply_fn=None, params=PARAMS, tx=wrap(INNER))
    for gradient in GRADS[:4]:
        state = state.apply_gradients(grads=gradient)
    assert_bitwise(state.params, train(INNER, MEANS[:2])[0])
    assert state.step == 4
    assert state.opt_state.optimizer_step == 2


@pytest.mark.parametrize("reset_state", [False, True])
def test_lookahead_around_counts_micro_batches(reset_state: bool) -> None:
    """Its sync_period is times `steps`; then it syncs at the ends of windows, as around
    the bare optimizer on large batches.
    """
    pair = optax.LookaheadParams.init_synced(PARAMS)
    ours = optax.lookahead(wrap(INNER), 2 * STEPS, 0.5, reset_state)
    theirs = optax.lookahead(INNER, 2, 0.5, reset_state)
    moved, state = train(ours, GRADS, pair)
    assert_close(moved, train(theirs, MEANS, pair)[0], 5e-7)
    with pytest.raises(gradaccum.ArgumentTypeError, match="expected a wrapped optim"):
        gradaccum_jax.flush(ours, state, pair)


def loss(params: Any, x: Any) -> Any:
    return jnp.mean((x @ params["w"] + params["b"][0] - 1) ** 2)


def test_line_search_on_a_split_batch() -> None:
    """A line search asks for the loss of the same batch again and again: split the
    batch, and use the bare optimizer.
    """
    x = jnp.asarray(np.random.default_rng(0).normal(size=(8, 3)), jnp.float32)

    def minimised(value_and_grad):
        tx = optax.lbfgs()
        params = PARAMS
        state = tx.init(params)
        for _ in range(2):
            value, grad = value_and_grad(params, x)
            extra = {
                "value": value,
                "grad": grad,
                "value_fn": lambda params: value_and_grad(params, x)[0],
            }
            updates, state = tx.update(grad, state, params, **extra)
            params = optax.apply_updates(params, updates)
        return params

    ours = jax.jit(lambda: minimised(gradaccum_jax.value_and_grad(loss, steps=4)))()
    theirs = jax.jit(lambda: minimised(jax.value_and_grad(loss)))()
    assert_close(ours, theirs, 5e-5)
