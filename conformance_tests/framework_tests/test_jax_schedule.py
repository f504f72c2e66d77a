"""A callable ``steps``: its values are checked where they are known, its dtype where JAX traces, and none below 1 passes in silence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

pytest.importorskip("optax", reason="optax is not installed")
import jax
import jax.numpy as jnp
import optax

import gradaccum
import gradaccum_jax

MAKERS: dict[str, Callable[..., Any]] = {"wrap": gradaccum.wrap, "multisteps": gradaccum_jax.MultiSteps}
PARAMS = jnp.ones(2)
by_name = pytest.mark.parametrize("name", MAKERS)


@pytest.mark.parametrize("value", [0, 2.5, jnp.asarray(0), jnp.asarray(2.5), np.float32(2)], ids=repr)
@by_name
def test_no_size_for_the_first_window(name: str, value: Any) -> None:
    with pytest.raises(gradaccum.GradAccumError, match=r"^steps\(0\): expected an int >= 1"):
        MAKERS[name](optax.sgd(1.0), lambda step: value)


@by_name
def test_no_size_for_the_first_window_under_jit(name: str) -> None:
    with pytest.raises(gradaccum.ArgumentValueError, match=r"^steps\(0\)"):
        jax.jit(lambda: MAKERS[name](optax.sgd(1.0), lambda step: 0 * step).init(PARAMS))()


@by_name
def test_no_integers_while_jax_traces(name: str) -> None:
    """Right for step 0, where it is concrete; of the others only the dtype is known."""
    tx = MAKERS[name](optax.sgd(1.0), lambda step: 2.0 * step if isinstance(step, jax.core.Tracer) else 2)
    with pytest.raises(gradaccum.ArgumentTypeError, match=r"^steps\(optimizer_step\): .*float32 and shape.*astype"):
        jax.jit(tx.update)(PARAMS, tx.init(PARAMS), PARAMS)


@by_name
def test_a_later_window_of_no_size_outside_jit(name: str) -> None:
    tx = MAKERS[name](optax.sgd(1.0), lambda step: 1 - step)
    updates, state = tx.update(PARAMS, tx.init(PARAMS), PARAMS)
    np.testing.assert_array_equal(updates, -PARAMS)
    with pytest.raises(gradaccum.ArgumentValueError, match=r"^steps\(1\): expected an int >= 1; got Array\(0,"):
        tx.update(PARAMS, state, PARAMS)


@pytest.mark.parametrize("on_overflow", ["skip_window", "drop_micro_batch"])
def test_a_later_window_of_no_size_under_jit(on_overflow: str) -> None:
    """It makes no update, whatever happens next, and the result says so."""
    tx = gradaccum.wrap(optax.sgd(1.0), lambda step: 1 - step, on_overflow=on_overflow)
    update = jax.jit(tx.update)
    _, state = update(PARAMS, tx.init(PARAMS), PARAMS)
    for micro_batch in range(2):
        updates, state = update(PARAMS, state, PARAMS)
        result = gradaccum_jax.result(state)
        assert (result.applied, result.skipped, result.overflow, result.optimizer_step) == (False, True, True, 1)
        assert state.skipped_windows == micro_batch + 1
        assert not np.any(updates)


def test_multisteps_makes_no_update_in_a_window_of_no_size() -> None:
    """As optax's, whose window then never ends."""
    tx = gradaccum_jax.MultiSteps(optax.sgd(1.0), lambda step: 1 - step)
    update = jax.jit(tx.update)
    _, state = update(PARAMS, tx.init(PARAMS), PARAMS)
    for _ in range(2):
        updates, state = update(PARAMS, state, PARAMS)
        assert not np.any(updates)
        assert state.gradient_step == 1


def test_a_window_of_constant_size_asks_nothing_of_the_device() -> None:
    tx, calls = gradaccum.wrap(optax.sgd(1.0), 2), []
    state = tx.init(PARAMS)
    tx.update(PARAMS, state, PARAMS)
    with jax.transfer_guard("disallow"):
        calls.append(tx.update(PARAMS, state, PARAMS))
    assert calls
