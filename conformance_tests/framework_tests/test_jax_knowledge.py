"""A window's loss in JAX, also for inner optimizers that read it; refusals."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradaccum
import gradaccum_jax
from conformance_tests.framework_tests.refusing import refused

PARAMS = {"w": jnp.asarray([1.0, -2.0, 0.5])}
RNG = np.random.default_rng(3)
ROWS = [
    (jnp.asarray(RNG.normal(size=3), jnp.float32), float(n), float(RNG.uniform(1, 2)))
    for n in (3, 1, 4, 1, 5, 2)
]
"""Gradient, weight and loss of each micro-batch: two windows of three."""


def noting() -> Any:
    """Plain SGD whose state is the last ``value``."""

    def update(
        updates: Any, state: Any, params: Any = None, *, value: Any, **_: Any
    ) -> Any:
        return jax.tree.map(lambda u: -0.1 * u, updates), jnp.asarray(
            value, jnp.float32
        )

    return optax.GradientTransformationExtraArgs(lambda params: jnp.zeros(()), update)


def after(tx: Any, rows: Any) -> Any:
    """The state after these micro-batches."""
    state, step = tx.init(PARAMS), jax.jit(tx.update)
    for gradient, weight, loss in rows:
        _, state = step({"w": gradient}, state, PARAMS, weight=weight, value=loss)
    return state


def mean_of(rows: Any) -> float:
    return sum(weight * loss for _, weight, loss in rows) / sum(
        weight for _, weight, _ in rows
    )


@pytest.mark.parametrize("steps", [None, 5])
def test_flush_gives_the_windows_loss(steps: int | None) -> None:
    tx = gradaccum.wrap(noting(), steps=steps)
    state = after(tx, ROWS[:3])
    closed = gradaccum_jax.flush(tx, state, PARAMS)[1]
    assert float(closed.inner_state) == pytest.approx(mean_of(ROWS[:3]), rel=1e-6)
    own = gradaccum_jax.flush(tx, state, PARAMS, value=7.0)[1]
    assert (float(own.inner_state), float(own.last_loss)) == (
        7.0,
        float(closed.last_loss),
    )


def test_loss_that_is_read_and_was_not_told() -> None:
    reading = gradaccum.wrap(noting(), steps=3)
    with pytest.raises(TypeError, match="value"):
        reading.update(PARAMS, reading.init(PARAMS), PARAMS)


@pytest.mark.parametrize(
    "value", [jnp.ones(2), "1", 1j, True, jax.random.key(0)], ids=str
)
def test_what_is_no_loss_is_refused(value: Any) -> None:
    tx = gradaccum.wrap(optax.sgd(0.1), steps=2)
    with refused(gradaccum.ArgumentTypeError, "value", "a real scalar"):
        tx.update(PARAMS, tx.init(PARAMS), PARAMS, value=value)


def strict(steps: Any) -> Any:
    """An optimizer whose update takes ``scale`` and nothing else."""

    def update(
        updates: Any, state: Any, params: Any = None, *, scale: Any = 1.0
    ) -> Any:
        return jax.tree.map(lambda u: -scale * u, updates), state

    return gradaccum.wrap(
        optax.GradientTransformationExtraArgs(
            lambda params: optax.EmptyState(), update
        ),
        steps=steps,
    )


@pytest.mark.parametrize("value", [None, 3.0], ids=["untold", "told"])
@pytest.mark.parametrize("jit", [False, True], ids=["outside jit", "jit"])
def test_optimizer_that_takes_no_value_is_called_without(value: Any, jit: bool) -> None:
    def wrap(function: Any) -> Any:
        return jax.jit(function) if jit else function

    told, wanted = {} if value is None else {"value": value}, -2 * PARAMS["w"]
    tx = strict(1)
    updates, state = wrap(lambda s: tx.update(PARAMS, s, PARAMS, scale=2.0, **told))(
        tx.init(PARAMS)
    )
    np.testing.assert_array_equal(updates["w"], wanted)
    np.testing.assert_equal(
        float(gradaccum_jax.result(state).loss), np.nan if value is None else value
    )
    whole = strict(None)
    _, state = wrap(lambda s: whole.update(PARAMS, s, PARAMS, **told))(
        whole.init(PARAMS)
    )
    updates, state = wrap(lambda s: gradaccum_jax.flush(whole, s, PARAMS, scale=2.0))(
        state
    )
    np.testing.assert_array_equal(updates["w"], wanted)
    np.testing.assert_equal(
        float(gradaccum_jax.result(state).loss), np.nan if value is None else value
    )


@pytest.mark.parametrize("opaque", [False, True])
def test_window_of_sam_is_flushed(opaque: bool) -> None:
    def sam() -> Any:
        return optax.contrib.sam(
            optax.sgd(0.1),
            optax.chain(optax.contrib.normalize(), optax.sgd(0.05)),
            opaque_mode=opaque,
        )

    extra: dict[str, Any] = (
        {"grad_fn": lambda params, _: jax.tree.map(lambda p: p**3, params)}
        if opaque
        else {}
    )
    tx, bare = gradaccum.wrap(sam(), steps=None), sam()
    wanted, _ = bare.update(PARAMS, bare.init(PARAMS), PARAMS, **extra)
    updates, _ = gradaccum_jax.flush(
        tx, tx.update(PARAMS, tx.init(PARAMS), PARAMS, **extra)[1], PARAMS, **extra
    )
    np.testing.assert_allclose(updates["w"], wanted["w"], rtol=1e-6)
