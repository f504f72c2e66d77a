"""`gradaccum_jax.MultiSteps` equals `optax.MultiSteps` after every mini-step, and has
none of its faults.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradaccum
import gradaccum_jax

PARAMS = {"a": jnp.asarray([1.0, -2.0, 0.5]), "b": jnp.asarray([[3.0, 0.25]])}
NEEDS_ACCUMULATOR_DTYPE = pytest.mark.skipif(
    "accumulator_dtype" not in inspect.signature(optax.MultiSteps).parameters,
    reason="this optax's MultiSteps has no accumulator_dtype",
)
LARGE = functools.partial(optax.skip_large_updates, max_squared_norm=30.0)


def gradients(count: int, bad: dict[int, float]) -> list[Any]:
    rng = np.random.default_rng(3)
    trees = [
        jax.tree.map(
            lambda p: jnp.asarray(rng.standard_normal(p.shape), jnp.float32), PARAMS
        )
        for _ in range(count)
    ]
    return [
        jax.tree.map(lambda g, i=i: g.at[..., 0].set(bad[i]), tree)
        if i in bad
        else tree
        for i, tree in enumerate(trees)
    ]


def assert_close(ours: Any, theirs: Any, tolerance: float) -> None:
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(
            np.asarray(a, np.float64),
            np.asarray(b, np.float64),
            rtol=tolerance,
            atol=tolerance,
        )


@pytest.mark.parametrize(
    ("arguments", "bad"),
    [
        ({"every_k_schedule": 3}, {}),
        ({"every_k_schedule": 1}, {}),
        ({"every_k_schedule": 3, "use_grad_mean": False}, {}),
        ({"every_k_schedule": lambda step: jnp.where(step < 2, 2, 4)}, {}),
        (
            {"every_k_schedule": 3, "should_skip_update_fn": optax.skip_not_finite},
            {0: np.nan, 4: np.inf, 5: -np.inf, 8: np.nan},
        ),
        (
            {
                "every_k_schedule": 3,
                "should_skip_update_fn": LARGE,
                "use_grad_mean": False,
            },
            {1: 6.0, 2: 7.0, 7: np.nan},
        ),
        pytest.param(
            {"every_k_schedule": 2, "accumulator_dtype": jnp.bfloat16},
            {},
            marks=NEEDS_ACCUMULATOR_DTYPE,
        ),
    ],
    ids=["mean", "every_step", "sum", "schedule", "not_finite", "large", "bfloat16"],
)
def test_states_equal_optaxs(arguments: dict[str, Any], bad: dict[int, float]) -> None:
    # optax then rounds the mean that it stores, but not the one that it passes on.
    rounded = "accumulator_dtype" in arguments
    inner, tolerance = (
        (optax.sgd(0.1, momentum=0.9), 2**-6) if rounded else (optax.adamw(0.1), 2e-6)
    )
    ours, theirs = (
        gradaccum_jax.MultiSteps(inner, **arguments),
        optax.MultiSteps(inner, **arguments),
    )
    state, expected = ours.init(PARAMS), theirs.init(PARAMS)
    assert_close(state, expected, tolerance)
    update, reference = jax.jit(ours.update), jax.jit(theirs.update)
    for gradient in gradients(12, bad):
        updates, state = update(gradient, state, PARAMS)
        wanted, expected = reference(gradient, expected, PARAMS)
        assert_close(updates, wanted, tolerance)
        assert_close(state, expected, tolerance)
        assert bool(ours.has_updated(state)) == bool(theirs.has_updated(expected))


def test_interface_equals_optaxs() -> None:
    for name in (
        "__init__",
        "init",
        "update",
        "has_updated",
        "gradient_transformation",
    ):
        mine, theirs = (
            inspect.signature(getattr(kind, name)).parameters
            for kind in (gradaccum_jax.MultiSteps, optax.MultiSteps)
        )
        assert [
            parameter
            for parameter in mine
            if parameter in theirs or parameter != "accumulator_dtype"
        ] == list(theirs)
    ours = gradaccum_jax.MultiSteps(optax.sgd(0.1), 2)
    assert isinstance(ours.inner_opt, optax.GradientTransformationExtraArgs)
    assert isinstance(ours.init(PARAMS), optax.MultiStepsState)


def test_nan_lasts_one_window() -> None:
    """In optax it stays for ever."""
    for kind, heals in ((gradaccum_jax.MultiSteps, True), (optax.MultiSteps, False)):
        steps = kind(optax.sgd(1.0), 2)
        state = steps.init(PARAMS)
        for gradient in gradients(4, {0: np.nan}):
            updates, state = steps.update(gradient, state, PARAMS)
        assert bool(jnp.all(jnp.isfinite(updates["a"]))) is heals
    assert int(state.gradient_step) == 2


def test_chain_passes_extra_arguments() -> None:
    def update(
        updates: Any, state: Any, params: Any = None, *, factor: Any, **rest: Any
    ) -> tuple[Any, Any]:
        return jax.tree.map(lambda u: factor * u, updates), state

    inner = optax.GradientTransformationExtraArgs(
        lambda params: optax.EmptyState(), update
    )
    tx = optax.chain(gradaccum_jax.MultiSteps(inner, 1).gradient_transformation())
    updates, _ = tx.update(PARAMS, tx.init(PARAMS), PARAMS, factor=3.0)
    np.testing.assert_array_equal(updates["a"], 3 * PARAMS["a"])


def test_none_gradient_counts_as_zero() -> None:
    steps = gradaccum_jax.MultiSteps(optax.sgd(1.0), 2)
    _, state = steps.update(PARAMS, steps.init(PARAMS), PARAMS)
    updates, _ = steps.update({"a": None, "b": PARAMS["b"]}, state, PARAMS)
    np.testing.assert_array_equal(updates["a"], -PARAMS["a"] / 2)
    np.testing.assert_array_equal(updates["b"], -PARAMS["b"])


@pytest.mark.parametrize("every", [0, -1, None, 2.5, True])
def test_invalid_window_size_is_refused(every: Any) -> None:
    with pytest.raises(gradaccum.GradAccumError):
        gradaccum_jax.MultiSteps(optax.sgd(1.0), every)


def test_invalid_optimizer_or_flag_is_refused() -> None:
    with pytest.raises(gradaccum.ArgumentTypeError, match="optimizer"):
        gradaccum_jax.MultiSteps(optax.MultiSteps(optax.sgd(1.0), 2), 2)  # type: ignore[arg-type]
    steps = gradaccum_jax.MultiSteps(
        optax.sgd(1.0), 2, should_skip_update_fn=lambda *_: (jnp.zeros(3), ())
    )
    state = optax.MultiSteps(optax.sgd(1.0), 2).init(PARAMS)
    with pytest.raises(gradaccum.ArgumentTypeError, match="should_skip_update_fn"):
        steps.update(PARAMS, state, PARAMS)
