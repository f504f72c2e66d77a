"""Loss scaling in JAX: the scale moves as in jmp, an overflow leaves no trace, and a step never waits for the host.

The scale takes the values of `jmp.DynamicLossScale`, stepped once per window. gradaccum has more by design. The backoff has its own factor;
jmp divides by the growth factor, so both agree for powers of two, where product and quotient are exact. The scale has a ceiling. A window
of weight 0 is neither clean nor overflowed.
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

INF = float("inf")
RUNS, WINDOWS = 3000, 200


def switched(wide: bool) -> Any:
    if hasattr(jax, "enable_x64"):
        return jax.enable_x64(wide)
    from jax.experimental import enable_x64

    return enable_x64(wide)


def our_trace(factor: Any, interval: Any, start: Any, floor: Any, clean: Any) -> Any:
    """Return (loss_scale, growth_tracker) after each window, by the transitions."""
    rule = gradaccum.kit.ScaleRule(1.0, factor, 1 / factor, interval, floor, INF)
    options = gradaccum.kit.make_options(2, reduction="sum")._replace(
        scale_rule=rule
    )  # A mean would multiply 2^127 by the weight, beyond float32.
    zero = jnp.zeros((), jnp.int32)

    def window(state: Any, finite: Any) -> Any:
        for _ in range(2):
            state = gradaccum.kit.accumulate(state, jnp.ones(()), jnp.asarray(True), jnp.where)
        apply, overflow, _, _ = gradaccum.kit.decide(state, jnp.ones(()), finite, options, jnp.where)
        state = gradaccum.kit.close(state, apply, overflow, options, jnp.where)
        return state, (state[5], state[6])

    return jax.lax.scan(window, (zero, zero, zero, jnp.zeros(()), zero > 0, start, zero), clean)[1]


def jmp_trace(factor: Any, interval: Any, start: Any, floor: Any, clean: Any) -> Any:
    jmp = pytest.importorskip("jmp", reason="jmp is not installed")

    def window(carry: Any, finite: Any) -> Any:
        scaler = jmp.DynamicLossScale(*carry, period=interval, factor=factor, min_loss_scale=floor).adjust(finite)
        return (scaler.loss_scale, scaler.counter), (scaler.loss_scale, scaler.counter)

    return jax.lax.scan(window, (start, jnp.zeros((), jnp.int32)), clean)[1]


def test_scale_moves_as_in_jmp() -> None:
    rng = np.random.default_rng(0)
    start = 2.0 ** rng.integers(-20, 128, RUNS)
    floor = np.minimum(start, 2.0 ** rng.integers(-30, 10, RUNS))
    clean = rng.random((RUNS, WINDOWS)) < rng.choice([0.1, 0.5, 0.9, 0.99, 1.0], (RUNS, 1))
    arguments = [jnp.asarray(a, jnp.float32) for a in (2.0 ** rng.integers(1, 5, RUNS), rng.integers(1, 12, RUNS), start, floor)]
    arguments[1] = arguments[1].astype(jnp.int32)
    ours, theirs = (jax.jit(jax.vmap(trace))(*arguments, jnp.asarray(clean)) for trace in (our_trace, jmp_trace))
    np.testing.assert_array_equal(ours[1], theirs[1])
    np.testing.assert_array_equal(ours[0], theirs[0])
    assert np.all(np.isfinite(ours[0]) & (np.asarray(ours[0]) > 0))
    assert np.any(np.asarray(ours[0]) == floor[:, None]), "no run came down to its floor"
    assert np.any(np.asarray(ours[0]) >= 2.0**124), "no run came up to float32's limit"


@pytest.mark.parametrize("wide", [False, True], ids=["x32", "x64"])
@pytest.mark.parametrize("master_weights", [False, True])
def test_scaled_float16_autograd(wide: bool, master_weights: bool) -> None:
    """A derivative of 2^-26 is 0 in float16. Under a scale of 2^12 it survives."""
    with switched(wide):
        params = {"w": jnp.asarray([1.0, 2.0], jnp.float16)}
        x = jnp.asarray([2.0**-13, 2.0**-13], jnp.float16)
        tx = gradaccum.wrap(optax.sgd(1.0), steps=2, loss_scale=2.0**12, master_weights=master_weights)
        state = tx.init(params)
        assert gradaccum_jax.scale_loss(jnp.float16(2.0), state).dtype == jnp.float32

        def loss(p: Any, scale: Any) -> Any:
            product = jnp.mean(p["w"] * x) * jnp.float16(2.0**-12)
            return scale(product)

        assert not np.any(jax.grad(loss)(params, lambda value: value)["w"])
        for _ in range(2):
            grads = jax.grad(loss)(params, lambda value: gradaccum_jax.scale_loss(value, state))  # noqa: B023
            assert grads["w"].dtype == jnp.float16
            np.testing.assert_array_equal(grads["w"], np.float16(2.0**-14))
            updates, state = tx.update(grads, state, params)
        assert state.loss_scale.dtype == jnp.float32
        assert gradaccum_jax.result(state).grad_norm == pytest.approx(2**0.5 * 2.0**-26)
        expected = -(2.0**-26) if master_weights else np.float16(-(2.0**-26))
        moved = state.masters["w"] - np.asarray([1.0, 2.0], np.float32) if master_weights else updates["w"]
        np.testing.assert_array_equal(moved, np.float32([1, 2]) + np.float32(expected) - np.float32([1, 2]) if master_weights else expected)


STRATEGIES = [
    {},
    {"loss_scale": 8.0, "clip_norm": 1.0},
    {"loss_scale": gradaccum.DynamicLossScale(), "master_weights": True},
    {"on_overflow": "drop_micro_batch", "skip_norm": 1.0},
]


@pytest.mark.parametrize("options", STRATEGIES, ids=str)
def test_step_never_waits_for_the_host(options: dict[str, Any]) -> None:
    tx = gradaccum.wrap(optax.adamw(1e-3), steps=2, **options)
    params = {"a": jnp.ones((4, 3), jnp.bfloat16), "b": jnp.ones(3, jnp.float16)}

    def step(params: Any, state: Any, grads: Any, weight: Any) -> Any:
        updates, state = tx.update(grads, state, params, weight=weight)
        return optax.apply_updates(params, updates), state, gradaccum_jax.result(state)

    step = jax.jit(step)
    weight, state = jnp.asarray(2.0), tx.init(params)
    assert not any(word in str(jax.make_jaxpr(step)(params, state, params, weight)) for word in ("callback", "infeed", "outfeed", "debug"))
    step(params, state, params, weight)
    grads = params
    with jax.transfer_guard("disallow"):
        for _ in range(4):
            params, state, _ = step(params, state, grads, weight)
        with pytest.raises(Exception, match=r"[Dd]isallowed"):
            step(params, state, grads, np.float32(2.0))
    assert state.optimizer_step + state.skipped_windows == 2


def test_complex128_parameters_in_complex64_sums() -> None:
    with switched(True):
        tx = gradaccum.wrap(optax.sgd(1.0), steps=2, accumulate_dtype="float32")
        params = jnp.asarray([1.0 + 2.0j, 3.0])
        state = tx.init(params)
        assert state.accumulator.dtype == jnp.complex64
        for _ in range(2):
            updates, state = tx.update(params, state, params)
        np.testing.assert_array_equal(updates, -params)
        with pytest.raises(gradaccum.GradientError, match="complex128"):
            gradaccum.wrap(optax.sgd(1.0), steps=2).update(params, gradaccum.wrap(optax.sgd(1.0), steps=2).init(params.real))
