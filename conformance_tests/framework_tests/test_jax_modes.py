"""JAX's modes and transformations around a wrapped optimizer with the default control
flow.
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
from conformance_tests.framework_tests.jax_versions import needs_shard_map

PARAMS = {"w": jnp.ones((2, 3)), "b": jnp.ones(3)}
MAKERS = [
    lambda inner: gradaccum.wrap(inner, steps=2, clip_norm=1.0),
    lambda inner: gradaccum_jax.MultiSteps(inner, 2),
]


@pytest.mark.parametrize("make", MAKERS, ids=["wrap", "multisteps"])
def test_no_tracer_leaks(make: Any) -> None:
    tx = make(optax.adam(0.1))
    with jax.checking_leaks():
        jax.jit(tx.update)(PARAMS, tx.init(PARAMS), PARAMS)


@pytest.mark.parametrize("make", MAKERS, ids=["wrap", "multisteps"])
def test_ordered_effects_run_once(make: Any, capfd: pytest.CaptureFixture[str]) -> None:
    def update(gradients: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        jax.debug.print("ran", ordered=True)
        return gradients, state

    tx = make(optax.GradientTransformation(lambda params: optax.EmptyState(), update))
    state, step = tx.init(PARAMS), jax.jit(tx.update)
    for _ in range(4):
        _, state = step(PARAMS, state, PARAMS)
    jax.effects_barrier()
    assert capfd.readouterr().out.count("ran") == 2


@pytest.mark.parametrize("make", MAKERS, ids=["wrap", "multisteps"])
def test_strict_promotion(make: Any) -> None:
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), PARAMS)
    tx = make(optax.sgd(0.1))
    with jax.numpy_dtype_promotion("strict"):
        tx.update(half, tx.init(half), half)


@pytest.mark.parametrize(
    "make",
    [MAKERS[1], lambda inner: gradaccum.wrap(inner, steps=2)],
    ids=["multisteps", "wrap"],
)
def test_reverse_mode_matches_forward_mode(make: Any) -> None:
    def loss(gradient: Any) -> Any:
        params, tx = PARAMS, make(optax.adam(0.1))
        state = tx.init(params)
        for _ in range(2):
            updates, state = tx.update(
                jax.tree.map(lambda leaf: gradient * leaf, params), state, params
            )
            params = optax.apply_updates(params, updates)
        return sum(jnp.sum((leaf - 2) ** 3) for leaf in jax.tree.leaves(params))

    forward = jax.jvp(loss, (jnp.float32(1e-8),), (jnp.float32(1),))[1]
    assert forward != 0
    np.testing.assert_allclose(
        jax.jit(jax.grad(loss))(jnp.float32(1e-8)), forward, rtol=1e-4
    )


@pytest.mark.parametrize("phases", [[1, 1, 1], [0, 1, 0]], ids=["together", "apart"])
@pytest.mark.parametrize(
    "outer", ["grad of vmap", pytest.param("vmap of grad", marks=pytest.mark.deep)]
)
def test_reverse_mode_under_vmap(outer: str, phases: list[int]) -> None:
    """A member in mid-window adds nothing to the derivative, though that of its update,
    sqrt at 0, would be inf.
    """
    starts, counts = jnp.arange(3.0), jnp.array(phases, jnp.int32)

    root = optax.stateless(lambda updates, params: jax.tree.map(jnp.sqrt, updates))
    tx = gradaccum.wrap(root, steps=2)

    def loss(rate: Any, start: Any, count: Any) -> Any:
        state = tx.init(start)._replace(micro_step=count)
        updates, _ = tx.update(rate * start, state, start)
        return (start + updates) ** 2

    if outer == "vmap of grad":
        found = jax.vmap(jax.grad(loss), (None, 0, 0))(jnp.float32(0.5), starts, counts)
    else:
        found = jax.grad(
            lambda rate: jax.vmap(loss, (None, 0, 0))(rate, starts, counts).sum()
        )(jnp.float32(0.5))
    alone = [
        jax.grad(loss)(jnp.float32(0.5), start, count)
        for start, count in zip(starts, counts, strict=True)
    ]
    assert np.any(np.asarray(alone) != 0)
    np.testing.assert_allclose(
        found, alone if outer == "vmap of grad" else sum(alone), rtol=1e-6
    )


@pytest.mark.parametrize("jit", [False, True], ids=["outside jit", "jit"])
@pytest.mark.parametrize(
    ("told", "options"),
    [
        (True, {}),
        (False, {}),
        (False, {"on_overflow": "ignore"}),
        (True, {"clip_norm": 1.0}),
    ],
    ids=str,
)
def test_debug_nans_stops_at_no_nan_of_the_window(
    told: bool, options: dict[str, Any], jit: bool
) -> None:
    """A loss that nobody told, and a norm that nobody measured, are NaN in the result
    alone.
    """
    tx, value = (
        gradaccum.wrap(optax.sgd(0.1), steps=2, **options),
        {"value": 1.5} if told else {},
    )
    with jax.debug_nans(True):
        state = first = tx.init(PARAMS)
        update = jax.jit(tx.update) if jit else tx.update
        for _ in range(3):
            _, state = update(PARAMS, state, PARAMS, **value)
        result = gradaccum_jax.result(gradaccum_jax.discard(tx, state))
        assert np.isnan(gradaccum_jax.result(first).loss)
    np.testing.assert_equal(float(result.loss), 1.5 if told else np.nan)
    assert np.isnan(result.grad_norm) == ("on_overflow" in options)


def test_debug_nans_still_stops_at_a_nan_of_the_optimizer() -> None:
    tx = gradaccum.wrap(
        optax.stateless(lambda updates, params: jax.tree.map(jnp.log, updates)), steps=1
    )
    with jax.debug_nans(True), pytest.raises(FloatingPointError):
        tx.update(jax.tree.map(jnp.negative, PARAMS), tx.init(PARAMS), PARAMS)


def test_derivative_under_strict_promotion() -> None:
    """JAX differentiates a jitted window after the call, when the user's promotion is
    in force again.
    """
    half, tx = jnp.ones(2, jnp.bfloat16), gradaccum.wrap(optax.sgd(1.0), steps=2)

    def norm(weight: Any) -> Any:
        state = tx.init(half)
        for gradient, own in ((half, weight), (0 * half, 1.0)):
            _, state = jax.jit(tx.update)(gradient, state, half, weight=own)
        return gradaccum_jax.result(state).grad_norm

    with jax.numpy_dtype_promotion("strict"):
        np.testing.assert_allclose(
            jax.grad(norm)(jnp.float32(2.0)), np.sqrt(2) / 9, rtol=1e-2
        )


@needs_shard_map
def test_window_that_one_device_shares_is_its_own() -> None:
    def run(axis: str | None) -> list[Any]:
        scale, mesh = (
            gradaccum.DynamicLossScale(init_scale=8.0, growth_interval=1),
            jax.make_mesh((1,), ("data",)),
        )
        shared: dict[str, Any] = {"axis_name": axis, "mesh": mesh} if axis else {}
        tx = gradaccum.wrap(
            optax.adam(0.1),
            steps=2,
            loss_scale=scale,
            clip_norm=1.0,
            **shared,
        )

        def step(params: Any, state: Any, gradient: Any, weight: Any) -> Any:
            gradients = jax.tree.map(lambda leaf: leaf * gradient[0], params)
            updates, state = tx.update(
                gradients, state, params, weight=weight[0], value=weight[0]
            )
            return optax.apply_updates(params, updates), state

        params, state, seen = PARAMS, tx.init(PARAMS), []
        whole = jax.jit(gradaccum_jax.data_parallel(step, mesh, axis) if axis else step)
        for number in (1.0, 3.0, np.inf, 1.0, 2.0, 5.0):
            params, state = whole(
                params,
                state,
                jnp.asarray([number]),
                jnp.asarray([number / 2 if number < 9 else 1.0]),
            )
            seen.append(jax.device_get((params, gradaccum_jax.result(state))))
        return seen

    jax.tree.map(np.testing.assert_array_equal, run("data"), run(None))
