"""Loss scaling and half-precision gradients in JAX: the scale's trace, the range of float16, nothing that waits for the host.

The trace is equal to that of `jmp.DynamicLossScale`, stepped once per window. By design there is more here than there: a factor of its own
for the backoff (jmp divides by the growth factor, so the two agree for powers of two, where its quotient and this product are both
exact), a ceiling, and windows of weight 0, which count as neither clean nor overflowed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("optax", reason="optax is not installed")
import jax
import jax.numpy as jnp
import optax

import gradaccum
import gradaccum_jax
from gradaccum_jax import sums

INF, NAN = float("inf"), float("nan")
RUNS, WINDOWS = 3000, 200


def switched(wide: bool) -> Any:
    if hasattr(jax, "enable_x64"):
        return jax.enable_x64(wide)
    from jax.experimental import enable_x64

    return enable_x64(wide)


def our_trace(factor: Any, interval: Any, start: Any, floor: Any, clean: Any) -> Any:
    """(loss_scale, growth_tracker) after each window, by the transitions."""
    rule = gradaccum.kit.ScaleRule(1.0, factor, 1 / factor, interval, floor, INF)
    options = gradaccum.kit.make_options(2, reduction="sum")._replace(scale_rule=rule)  # times a weight, 2^127 is beyond float32
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


def test_the_scale_moves_as_jmps_does() -> None:
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


@pytest.mark.parametrize("on_overflow", ["skip_window", "drop_micro_batch"])
def test_the_wrapped_optimizers_scale_moves_as_jmps_does(on_overflow: str) -> None:
    rng = np.random.default_rng(1)
    bad = rng.random((400, 3)) < 0.08
    rule = gradaccum.DynamicLossScale(init_scale=2.0**4, growth_interval=3, min_scale=2.0**-2)
    tx = gradaccum.wrap(optax.sgd(0.0), steps=3, loss_scale=rule, on_overflow=on_overflow)
    grads = np.where(bad.ravel(), rng.choice([INF, -INF, NAN], bad.size), 1.0).astype(np.float16)
    params = jnp.zeros((), jnp.float16)

    def body(state: Any, gradient: Any) -> Any:
        state = tx.update(gradient, state, params)[1]
        return state, (state.loss_scale, state.growth_tracker)

    scales, trackers = (np.asarray(a)[2::3] for a in jax.lax.scan(body, tx.init(params), jnp.asarray(grads))[1])
    expected = jmp_trace(2.0, 3, jnp.asarray(2.0**4), jnp.asarray(2.0**-2), jnp.asarray(~bad.any(axis=1)))
    np.testing.assert_array_equal(scales, expected[0])
    np.testing.assert_array_equal(trackers, expected[1])
    assert scales.min() == 2.0**-2


@pytest.mark.parametrize("wide", [False, True], ids=["x32", "x64"])
@pytest.mark.parametrize("master_weights", [False, True])
def test_scaled_float16_autograd(wide: bool, master_weights: bool) -> None:
    """A derivative of 2^-26 is 0 in float16; under a scale of 2^12 it arrives."""
    with switched(wide):
        params = {"w": jnp.asarray([1.0, 2.0], jnp.float16)}
        x = jnp.asarray([2.0**-13, 2.0**-13], jnp.float16)
        tx = gradaccum.wrap(optax.sgd(1.0), steps=2, loss_scale=2.0**12, master_weights=master_weights)
        state = tx.init(params)

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


@pytest.mark.parametrize("wide", [False, True], ids=["x32", "x64"])
@pytest.mark.parametrize("value", [INF, -INF, NAN])
@pytest.mark.parametrize("position", [0, 1, 2])
def test_bad_values_anywhere_in_the_first_window_leave_no_trace(wide: bool, value: float, position: int) -> None:
    with switched(wide):
        params = {"a": jnp.ones(2, jnp.float16), "b": jnp.ones(2, jnp.bfloat16)}
        rule = gradaccum.DynamicLossScale(init_scale=2.0, min_scale=1.0)
        tx = gradaccum.wrap(optax.sgd(0.5, momentum=0.9), steps=3, loss_scale=rule, master_weights=True)
        start = tx.init(params)
        good = {"a": jnp.ones(2, jnp.float16), "b": jnp.ones(2, jnp.bfloat16)}
        state = start
        for step in range(3):
            grads = {**good, "b": good["b"].at[1].set(value)} if step == position else good
            updates, state = tx.update(grads, state, params)
        assert (state.loss_scale, state.skipped_windows) == (1.0, 1)
        for kept, now in ((start.masters, state.masters), (start.inner_state, state.inner_state), (start.accumulator, state.accumulator)):
            assert all(np.array_equal(*pair) for pair in zip(*map(jax.tree.leaves, (kept, now)), strict=True))
        np.testing.assert_array_equal(optax.apply_updates(params, updates)["a"], params["a"])


@pytest.mark.parametrize(("largest", "fits"), [(65519.996, True), (65520.0, False), (-65520.0, False), (INF, False), (NAN, False)])
@pytest.mark.parametrize("shape", [(), (5,), (3, 4), (2, 3, 4)])
def test_what_rounds_to_infinity_in_float16(largest: float, fits: bool, shape: tuple[int, ...]) -> None:
    """65520 is halfway between the largest float16 and the next power of two: it rounds up."""
    total = np.ones(shape, np.float32)
    total.flat[-1] = 4 * np.float32(largest)
    found = jax.jit(lambda a: sums.fits({"a": a}, jnp.asarray(4.0), [jnp.dtype("float16")]))(total)
    with np.errstate(over="ignore"):
        assert bool(np.isfinite((total / np.float32(4)).astype(np.float16)).all()) is fits
    assert bool(found) is fits


def test_the_check_of_the_range_is_made_for_float16_alone() -> None:
    def program(dtype: Any, **options: Any) -> str:
        tx = gradaccum.wrap(optax.sgd(0.1), steps=2, **options)
        params = jnp.ones((4, 4), dtype)
        return str(jax.make_jaxpr(tx.update)(params, tx.init(params), params))

    assert "65520" in program(jnp.float16)
    for other in (program(jnp.float32), program(jnp.bfloat16), program(jnp.float16, master_weights=True)):
        assert "65520" not in other


@pytest.mark.parametrize("options", [{"clip_norm": 1.0}, {"skip_norm": 1e9}, {}])
def test_clipping_does_not_hide_an_overflow_of_the_cast(options: dict[str, Any]) -> None:
    for master_weights in (False, True):
        tx = gradaccum.wrap(optax.sgd(1e-6), steps=2, reduction="sum", master_weights=master_weights, **options)
        params = jnp.zeros(2, jnp.float16)
        state = tx.init(params)
        for _ in range(2):
            _, state = tx.update(jnp.full(2, 40000.0, jnp.float16), state, params)
        assert bool(gradaccum_jax.result(state).overflow) is not master_weights
        assert bool(gradaccum_jax.result(state).applied) is master_weights


STRATEGIES = [
    {},
    {"loss_scale": 8.0, "clip_norm": 1.0},
    {"loss_scale": gradaccum.DynamicLossScale(), "master_weights": True},
    {"on_overflow": "drop_micro_batch", "skip_norm": 1.0},
]


@pytest.mark.parametrize("options", STRATEGIES, ids=str)
def test_a_step_never_waits_for_the_host(options: dict[str, Any]) -> None:
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
