"""Half-precision parameters: float32 gradients reach the inner optimizer in float32,
and a sum beyond float16's range is an overflow.
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
from gradaccum_jax import window

CASES = {
    "bfloat16_fraction": (optax.sgd(1.0), jnp.bfloat16, 1.00390625),
    "float16_tiny": (optax.adam(0.05), jnp.float16, 1e-8),
    "float16_large": (optax.adam(0.1), jnp.float16, 1e5),
}


@pytest.mark.parametrize("accumulate_dtype", [None, "float32"])
@pytest.mark.parametrize("case", CASES)
def test_inner_optimizer_gets_wider_dtype(case: str, accumulate_dtype: Any) -> None:
    inner, dtype, value = CASES[case]
    params, gradient = jnp.ones(2, dtype), jnp.full(2, value, jnp.float32)
    expected, _ = inner.update(gradient, inner.init(params), params)
    tx = gradaccum.wrap(inner, steps=2, accumulate_dtype=accumulate_dtype)
    state = start = tx.init(params)
    for _ in range(2):
        updates, state = tx.update(gradient, state, params)
    assert gradaccum_jax.result(state).applied
    assert updates.dtype == expected.dtype == jnp.float32
    np.testing.assert_allclose(updates, expected, rtol=1e-6)
    assert jax.tree.map(jax.typeof, state) == jax.tree.map(jax.typeof, start)


@pytest.mark.parametrize("steps", [None, 4])
def test_flush_passes_the_unrounded_sum(steps: Any) -> None:
    """`flush` cannot know the gradients' dtype. It gives updates the dtype of the
    parameters, so with float32 ones it rounds nothing.
    """
    params, gradient = jnp.ones(2, jnp.bfloat16), jnp.full(2, 1.00390625, jnp.float32)
    tx = gradaccum.wrap(optax.sgd(1.0), steps=steps)
    _, state = tx.update(gradient, tx.init(params), params)
    assert gradaccum_jax.flush(tx, state, params)[0].dtype == jnp.bfloat16
    np.testing.assert_array_equal(
        gradaccum_jax.flush(tx, state, optax.tree_utils.tree_cast(params, jnp.float32))[
            0
        ],
        -gradient,
    )


def test_flush_makes_tiny_gradient_no_nan() -> None:
    params, tx = jnp.ones(2, jnp.float16), gradaccum.wrap(optax.adam(0.05), steps=4)
    _, state = tx.update(jnp.full(2, 1e-8, jnp.float32), tx.init(params), params)
    updates, state = gradaccum_jax.flush(tx, state, params)
    np.testing.assert_array_equal(updates, np.full(2, -0.025, np.float16))


def test_absent_last_gradient_rounds_nothing() -> None:
    """The last micro-batch has no gradient of the parameter. The sum still reaches the
    inner optimizer in float32.
    """
    params, tx = jnp.ones(2, jnp.float16), gradaccum.wrap(optax.adam(0.05), steps=2)
    _, state = tx.update(jnp.full(2, 2e-8, jnp.float32), tx.init(params), params)
    updates, _ = tx.update(None, state, params)
    np.testing.assert_array_equal(updates, np.full(2, -0.025, np.float16))


def test_range_check_is_for_float16_alone() -> None:
    def program(dtype: Any, **options: Any) -> str:
        tx = gradaccum.wrap(optax.sgd(0.1), steps=2, **options)
        params = jnp.ones((4, 4), dtype)
        return str(jax.make_jaxpr(tx.update)(params, tx.init(params), params))

    assert "65520" in program(jnp.float16)
    for other in (
        program(jnp.float32),
        program(jnp.bfloat16),
        program(jnp.float16, master_weights=True),
    ):
        assert "65520" not in other


PARAMS = {"w": jnp.ones((4, 4)), "half": jnp.ones(3, jnp.float16)}


def conditionals(jaxpr: Any) -> int:
    """The loops and conditionals of a program, with those inside of them."""
    inner = [
        getattr(value, "jaxpr", value)
        for eqn in jaxpr.eqns
        for value in jax.tree.leaves(list(eqn.params.values()))
        if _holds(value)
    ]
    return sum(eqn.primitive.name in ("while", "cond") for eqn in jaxpr.eqns) + sum(
        map(conditionals, inner)
    )


def _holds(value: Any) -> bool:
    return hasattr(getattr(value, "jaxpr", value), "eqns")


def program(**options: Any) -> Any:
    tx = gradaccum.wrap(
        optax.sgd(0.1), **{"steps": 3, "on_overflow": "ignore", **options}
    )
    return jax.make_jaxpr(
        lambda grads, state: tx.update(grads, state, PARAMS, weight=2.0)
    )(PARAMS, tx.init(PARAMS)).jaxpr


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"steps": gradaccum.until_weight(8)},
        {"loss_scale": 8.0},
        {"master_weights": True},
    ],
)
def test_nothing_is_measured(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    """The conditionals are the end of the window, of numbers alone, the division, and
    the inner optimizer's run. A measured norm has one more.
    """
    assert conditionals(program(**options)) == 3
    assert conditionals(program(**options, clip_norm=1.0)) == 4
    monkeypatch.setattr(window, "measure", None)
    monkeypatch.setattr(window.gradient_sum, "fits", None)
    program(**options)


def test_half_precision_overflows_as_a_bare_optimizer_does() -> None:
    """A sum that float16 cannot hold: inf reaches the optimizer."""
    tx = gradaccum.wrap(optax.sgd(1.0), steps=2, reduction="sum", on_overflow="ignore")
    state = tx.init(PARAMS)
    grads = {"w": PARAMS["w"], "half": jnp.full(3, 6e4, jnp.float16)}
    _, state = tx.update(grads, state, PARAMS)
    updates, state = tx.update(grads, state, PARAMS)
    assert np.isinf(updates["half"]).all()
    assert np.isfinite(updates["w"]).all()
    assert (state.optimizer_step, state.last_overflow) == (1, False)
