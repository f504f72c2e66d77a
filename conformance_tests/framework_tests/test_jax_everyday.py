"""The everyday loop: the last window of a loader ends in the step, arguments reach the
inner optimizer that declares them, and the state is right from the start.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradaccum
import gradaccum_jax

X = np.random.default_rng(0).normal(size=(10, 4, 3)).astype(np.float32)
PARAMS = jnp.ones(3)
INNER = optax.sgd(0.5, momentum=0.9)


def loss_fn(params: Any, x: Any) -> Any:
    return jnp.mean((x @ params - 1) ** 2)


def step_of(tx: Any) -> Callable[..., Any]:
    def step(params: Any, state: Any, x: Any, last: Any = None) -> Any:
        updates, state = tx.update(
            jax.grad(loss_fn)(params, x), state, params, weight=len(x), last=last
        )
        return optax.apply_updates(params, updates), state

    return step


def by_large_batches(*windows: Any) -> Any:
    tx = gradaccum.wrap(INNER, steps=1, clip_norm=0.3)
    params = PARAMS
    state = tx.init(PARAMS)
    for window in windows:
        params, state = step_of(tx)(params, state, window.reshape(-1, 3))
    return params


def assert_close(made: Any, wanted: Any) -> None:
    np.testing.assert_allclose(made, wanted, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("steps", [4, gradaccum.until_weight(16)], ids=str)
def test_the_last_window_of_a_loader_ends_in_the_step(steps: Any) -> None:
    """Ten micro-batches, one program, no flush. The next pass begins a window of its
    own.
    """
    tx = gradaccum.wrap(INNER, steps=steps, clip_norm=0.3)
    step = jax.jit(step_of(tx))
    params = PARAMS
    state = tx.init(PARAMS)
    for x, last in gradaccum_jax.epoch(iter(X)):
        params, state = step(params, state, x, last)
    assert_close(params, by_large_batches(X[:4], X[4:8], X[8:]))
    assert gradaccum_jax.result(state).applied
    assert state.micro_step == 0
    assert state.optimizer_step == 3
    one_of_two = state._replace(last_overflow=jnp.asarray([False, True]))
    assert gradaccum_jax.result(one_of_two).overflow
    assert step._cache_size() == 1
    assert step(params, state, X[0], False)[1].micro_step == 1


def test_windows_that_only_last_ends() -> None:
    """With ``steps=None`` the flag takes the place of a flush: in a scan, and in an
    ensemble whose members end apart.
    """
    tx = gradaccum.wrap(INNER, steps=None, clip_norm=0.3)
    ends = jnp.stack([np.isin(np.arange(10), (2, 3, 9)), np.arange(10) == 9])

    def trained(x, ends):
        return jax.lax.scan(
            lambda carry, given: (step_of(tx)(*carry, *given), None),
            (PARAMS, tx.init(PARAMS)),
            (x, ends),
        )[0]

    wanted = [by_large_batches(X[:3], X[3:4], X[4:]), by_large_batches(X)]
    assert_close(jax.jit(trained)(X, ends[0])[0], wanted[0])
    params, state = jax.vmap(trained, in_axes=(None, 0))(X, ends)
    assert state.optimizer_step.tolist() == [3, 1]
    assert_close(params, wanted)


def test_epoch_of_a_loader() -> None:
    drawn = []
    loader = (drawn.append(i) or i for i in range(3))  # type: ignore[func-returns-value]
    passing = gradaccum_jax.epoch(loader)
    assert next(passing) == (0, False)
    assert drawn == [0, 1]
    assert list(passing) == [(1, False), (2, True)]
    assert list(gradaccum_jax.epoch([])) == []


def factored(updates: Any, state: Any, params: Any = None, *, num_items: Any) -> Any:
    return jax.tree.map(lambda g: -num_items * g, updates), state


def test_declared_argument_reaches_the_inner_optimizer() -> None:
    """In a step, in a flush, and in a window that knows its loss, which the optimizer
    does not declare.
    """
    inner = optax.GradientTransformationExtraArgs(lambda params: (), factored)
    tx = gradaccum.wrap(inner, steps=1)
    updates, _ = tx.update(
        PARAMS, tx.init(PARAMS), PARAMS, weight=2, value=5.0, num_items=3.0
    )
    assert updates.tolist() == [-3.0] * 3
    whole = gradaccum.wrap(inner, steps=None)
    _, state = whole.update(
        PARAMS, whole.init(PARAMS), PARAMS, value=5.0, num_items=1.0
    )
    updates, state = gradaccum_jax.flush(whole, state, PARAMS, num_items=3.0)
    assert updates.tolist() == [-3.0] * 3
    assert gradaccum_jax.result(state).loss == 5


def test_flush_tells_the_inner_optimizer_the_windows_loss() -> None:
    """The mean by weights, or what the caller says."""

    def noting(updates, state, params=None, *, value):
        return updates, jnp.asarray(value, jnp.float32)

    tx = gradaccum.wrap(
        optax.GradientTransformationExtraArgs(lambda params: jnp.zeros(()), noting),
        steps=5,
    )
    state = tx.init(PARAMS)
    for weight, loss in ((3.0, 1.0), (1.0, 9.0)):
        _, state = tx.update(PARAMS, state, PARAMS, weight=weight, value=loss)
    for extra, told in (({}, 3.0), ({"value": 7.0}, 7.0)):
        closed = gradaccum_jax.flush(tx, state, PARAMS, **extra)[1]
        assert closed.inner_state == told
        assert closed.last_loss == 3.0


def test_bad_traced_denominator_makes_no_update() -> None:
    tx = gradaccum.wrap(optax.sgd(1.0), steps=None, reduction="sum")
    _, state = tx.update(PARAMS, tx.init(PARAMS), PARAMS)
    flush = jax.jit(
        lambda state, value: gradaccum_jax.flush(tx, state, PARAMS, denominator=value)
    )
    assert flush(state, 4)[0].tolist() == [-0.25] * 3
    for wrong in (0.0, np.nan):
        updates, ended = flush(state, wrong)
        assert not updates.any()
        assert gradaccum_jax.result(ended).skipped


@pytest.mark.parametrize("weight", [-1.0, np.nan, np.inf])
@pytest.mark.parametrize("on_overflow", ["skip_window", "ignore", "drop_micro_batch"])
def test_bad_traced_weight_skips(on_overflow: str, weight: float) -> None:
    """The window; with dropping, the micro-batch."""
    tx = gradaccum.wrap(optax.sgd(1.0), steps=2, on_overflow=on_overflow)
    update = jax.jit(lambda g, s, w: tx.update(g, s, weight=w))
    _, state = update(7 * PARAMS, tx.init(PARAMS), weight)
    updates, state = update(3 * PARAMS, state, 1.0)
    dropped = on_overflow == "drop_micro_batch"
    assert gradaccum_jax.result(state).applied == dropped
    assert updates.tolist() == [-3.0 * dropped] * 3


def test_discard_leaves_the_state_of_the_start() -> None:
    """Every leaf of it, the sum that the next window would write over too."""
    tx = gradaccum.wrap(
        optax.adam(0.1), steps=4, loss_scale=gradaccum.DynamicLossScale()
    )
    start = tx.init(PARAMS)
    _, state = tx.update(PARAMS, start, PARAMS, weight=3)
    discarded = jax.jit(lambda s: gradaccum_jax.discard(tx, s))(state)
    jax.tree.map(np.testing.assert_array_equal, discarded, start)
