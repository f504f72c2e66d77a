"""The program that JAX gets: it is compiled once, the state keeps its types, the host is
not asked, and JAX's debugging modes find nothing of the window's.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradaccum
import gradaccum_jax

PARAMS = {"w": jnp.ones((2, 3)), "half": jnp.ones(2, jnp.bfloat16), "scalar": 1.0}


def test_step_outside_jit_compiles_once() -> None:
    """And asks the device for nothing, so that it need not wait."""
    traces = []

    def update(gradients, state, params=None):
        traces.append(1)
        return gradients, state

    tx = gradaccum.wrap(
        optax.GradientTransformation(lambda params: optax.EmptyState(), update), steps=2
    )
    params = jnp.ones(3)
    _, state = tx.update(params, tx.init(params), params)
    after_first = len(traces)
    with jax.transfer_guard("disallow"):
        for _ in range(5):
            _, state = tx.update(params, state, params)
    assert len(traces) == after_first > 0


@pytest.mark.parametrize(
    "options",
    [{"on_overflow": "drop_micro_batch", "loss_scale": 8}, {"steps": [(0, 2), (1, 3)]}],
    ids=str,
)
@pytest.mark.parametrize("weight", [None, 2.0])
def test_state_types_hold_still(options: dict[str, Any], weight: float | None) -> None:
    tx = gradaccum.wrap(
        optax.inject_hyperparams(optax.adamw)(learning_rate=0.1),
        **{"steps": 2, **options},
    )
    start = tx.init(PARAMS)
    kinds = jax.tree.map(jax.typeof, start)
    assert not any(kind.weak_type for kind in jax.tree.leaves(kinds))
    for state in (
        tx.update({**PARAMS, "scalar": 2.0}, start, PARAMS, weight=weight)[1],
        gradaccum_jax.flush(tx, start, PARAMS)[1],
        gradaccum_jax.discard(tx, start),
    ):
        assert jax.tree.map(jax.typeof, state) == kinds


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize(
    ("told", "options"),
    [(None, {"on_overflow": "ignore"}), (1.5, {"clip_norm": 1.0})],
    ids=str,
)
def test_debug_nans_stops_at_no_nan_of_the_window(
    told: float | None, options: dict[str, Any], jit: bool
) -> None:
    """A loss that nobody told, and a norm that nobody measured, are NaN in the result
    alone.
    """
    tx = gradaccum.wrap(optax.sgd(0.1), steps=2, **options)
    with jax.debug_nans(True):
        state = first = tx.init(PARAMS)
        update = jax.jit(tx.update) if jit else tx.update
        for _ in range(3):
            _, state = update(PARAMS, state, PARAMS, value=told)
        result = gradaccum_jax.result(gradaccum_jax.discard(tx, state))
        assert np.isnan(gradaccum_jax.result(first).loss)
    np.testing.assert_equal(float(result.loss), told or np.nan)
    assert np.isnan(result.grad_norm) == ("on_overflow" in options)
