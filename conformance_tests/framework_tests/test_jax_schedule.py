"""A callable ``steps``: concrete values are checked, traced ones by their dtype, and a
window of size 0 never goes unnoticed.
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

MAKERS: dict[str, Callable[..., Any]] = {
    "wrap": gradaccum.wrap,
    "multisteps": gradaccum_jax.MultiSteps,
}
PARAMS = jnp.ones(2)
by_name = pytest.mark.parametrize("name", MAKERS)


@pytest.mark.parametrize(
    "value", [0, jnp.asarray(0), jnp.asarray(2.5), np.float32(2)], ids=repr
)
@by_name
def test_invalid_first_size_is_refused(name: str, value: Any) -> None:
    with pytest.raises(
        gradaccum.GradAccumError, match=r"^steps\(0\): expected an int >= 1"
    ):
        MAKERS[name](optax.sgd(1.0), lambda step: value)


@by_name
def test_invalid_first_size_under_jit(name: str) -> None:
    with pytest.raises(gradaccum.ArgumentValueError, match=r"^steps\(0\)"):
        jax.jit(
            lambda: MAKERS[name](optax.sgd(1.0), lambda step: 0 * step).init(PARAMS)
        )()


@by_name
def test_traced_size_must_be_an_integer(name: str) -> None:
    """The size is right for step 0, where it is concrete. For later steps only its
    dtype is known.
    """
    tx = MAKERS[name](
        optax.sgd(1.0),
        lambda step: 2.0 * step if isinstance(step, jax.core.Tracer) else 2,
    )
    with pytest.raises(
        gradaccum.ArgumentTypeError,
        match=r"^steps\(optimizer_step\): .*float32 and shape.*astype",
    ):
        jax.jit(tx.update)(PARAMS, tx.init(PARAMS), PARAMS)


@by_name
def test_invalid_later_size_is_refused(name: str) -> None:
    tx = MAKERS[name](optax.sgd(1.0), lambda step: 1 - step)
    updates, state = tx.update(PARAMS, tx.init(PARAMS), PARAMS)
    np.testing.assert_array_equal(updates, -PARAMS)
    with pytest.raises(
        gradaccum.ArgumentValueError,
        match=r"^steps\(1\): expected an int >= 1; got Array\(0,",
    ):
        tx.update(PARAMS, state, PARAMS)


def test_multisteps_stops_at_size_zero() -> None:
    """As `optax.MultiSteps`: a window of size 0 never ends."""
    tx = gradaccum_jax.MultiSteps(optax.sgd(1.0), lambda step: 1 - step)
    update = jax.jit(tx.update)
    _, state = update(PARAMS, tx.init(PARAMS), PARAMS)
    for _ in range(2):
        updates, state = update(PARAMS, state, PARAMS)
        assert not np.any(updates)
        assert state.gradient_step == 1


def test_constant_size_needs_no_transfer() -> None:
    tx, calls = gradaccum.wrap(optax.sgd(1.0), 2), []
    state = tx.init(PARAMS)
    tx.update(PARAMS, state, PARAMS)
    with jax.transfer_guard("disallow"):
        calls.append(tx.update(PARAMS, state, PARAMS))
    assert calls


def test_traced_callable_is_called_once() -> None:
    calls: list[Any] = []
    tx = gradaccum.wrap(optax.sgd(1.0), lambda step: calls.append(step) or 2)  # type: ignore[func-returns-value]
    state = tx.init(PARAMS)
    calls.clear()
    jax.make_jaxpr(tx.update)(PARAMS, state, PARAMS)
    assert len(calls) == 1
