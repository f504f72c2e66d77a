"""`gradaccum_jax.MultiSteps` equals `optax.MultiSteps` after every mini-step, and has
none of its faults.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradaccum_jax

from .jax_comparison import assert_close

PARAMS = {"a": jnp.asarray([1.0, -2.0, 0.5]), "b": jnp.asarray([[3.0, 0.25]])}
LARGE = functools.partial(optax.skip_large_updates, max_squared_norm=30.0)
CASES: dict[str, Any] = {
    "mean": ({"every_k_schedule": 3}, {}),
    "schedule": ({"every_k_schedule": lambda step: jnp.where(step < 2, 2, 4)}, {}),
    "not_finite": (
        {"every_k_schedule": 3, "should_skip_update_fn": optax.skip_not_finite},
        {0: np.nan, 4: np.inf, 5: -np.inf, 8: np.nan},
    ),
    "large sum": (
        {"every_k_schedule": 3, "should_skip_update_fn": LARGE, "use_grad_mean": False},
        {1: 6.0, 2: 7.0, 7: np.nan},
    ),
}
"""Arguments, and what some mini-steps' gradients hold in place of random numbers."""


def gradients(count: int, bad: dict[int, float]) -> list[Any]:
    rng = np.random.default_rng(3)
    trees = [
        jax.tree.map(
            lambda p: jnp.asarray(rng.standard_normal(p.shape), jnp.float32), PARAMS
        )
        for _ in range(count)
    ]
    for i, value in bad.items():
        trees[i] = jax.tree.map(lambda g, v=value: g.at[..., 0].set(v), trees[i])
    return trees


@pytest.mark.parametrize("name", CASES)
def test_states_equal_optaxs(name: str) -> None:
    arguments, bad = CASES[name]
    inner = optax.adamw(0.1)
    ours = gradaccum_jax.MultiSteps(inner, **arguments)
    theirs = optax.MultiSteps(inner, **arguments)
    state = ours.init(PARAMS)
    expected = theirs.init(PARAMS)
    assert_close(state, expected, 2e-6)
    update = jax.jit(ours.update)
    reference = jax.jit(theirs.update)
    for gradient in gradients(12, bad):
        updates, state = update(gradient, state, PARAMS)
        wanted, expected = reference(gradient, expected, PARAMS)
        assert_close(updates, wanted, 2e-6)
        assert_close(state, expected, 2e-6)
        assert bool(ours.has_updated(state)) == bool(theirs.has_updated(expected))


def test_nan_lasts_one_window() -> None:
    """In optax it stays for ever."""
    for kind, heals in ((gradaccum_jax.MultiSteps, True), (optax.MultiSteps, False)):
        steps = kind(optax.sgd(1.0), 2)
        state = steps.init(PARAMS)
        for gradient in gradients(4, {0: np.nan}):
            updates, state = steps.update(gradient, state, PARAMS)
        assert bool(jnp.all(jnp.isfinite(updates["a"]))) is heals
    assert int(state.gradient_step) == 2
