"""The wrapper beside and inside the combinators of optax: where it belongs, and what
counts micro-batches if it stands elsewhere.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("optax", reason="optax is not installed")
import jax
import jax.numpy as jnp
import optax
import optax.contrib

import gradaccum
import gradaccum_jax

STEPS = 2
PARAMS = {"w": jnp.asarray([1.0, -2.0, 4.0]), "b": jnp.asarray([0.5])}
GRADS = [jax.tree.map(lambda p, i=i: p / 4 + i, PARAMS) for i in range(8)]
"""Multiples of 1/8: the mean of two is exact, and so the wrapped run has the bare run's
bits.
"""
MEANS = [
    jax.tree.map(lambda a, b: (a + b) / 2, *GRADS[i : i + 2]) for i in range(0, 8, 2)
]


def train(
    tx: Any, grads: Any, params: Any = PARAMS, state: Any = None
) -> tuple[Any, Any]:
    state, update = tx.init(params) if state is None else state, jax.jit(tx.update)
    for gradient in grads:
        updates, state = update(gradient, state, params)
        params = optax.apply_updates(params, updates)
    return params, state


def assert_bitwise(a: Any, b: Any) -> None:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for left, right in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert np.asarray(left).tobytes() == np.asarray(right).tobytes()


def assert_close(a: Any, b: Any) -> None:
    jax.tree.map(
        lambda left, right: np.testing.assert_allclose(
            left, right, rtol=1e-6, atol=1e-7
        ),
        a,
        b,
    )


def wrap(inner: Any, **options: Any) -> Any:
    return gradaccum.wrap(inner, **{"steps": STEPS, **options})


def test_injected_rate_is_seen_and_set_in_mid_window() -> None:
    """The rate that stands in the state at the window's end is the one that the
    window's update has.
    """
    tx = wrap(optax.inject_hyperparams(optax.sgd)(learning_rate=0.5))
    _, state = train(tx, GRADS[:1])
    held = state.inner_state.hyperparams
    assert held["learning_rate"] == 0.5
    changed = state._replace(
        inner_state=state.inner_state._replace(
            hyperparams={**held, "learning_rate": jnp.asarray(0.25)}
        )
    )
    moved, after = train(tx, GRADS[1:2], state=changed)
    assert_bitwise(moved, jax.tree.map(lambda p, g: p - 0.25 * g, PARAMS, MEANS[0]))
    assert after.inner_state.hyperparams["learning_rate"] == 0.25
    found = optax.tree.set(state, learning_rate=jnp.asarray(0.25))
    assert_bitwise(train(tx, GRADS[1:2], state=found), (moved, after))


def test_injected_schedule_counts_updates() -> None:
    schedule = optax.piecewise_constant_schedule(0.5, {1: 0.5, 2: 0.5})
    inject = optax.inject_hyperparams(optax.sgd)
    moved, state = train(wrap(inject(learning_rate=schedule)), GRADS)
    wanted, bare = train(inject(learning_rate=schedule), MEANS)
    assert_bitwise((moved, state.inner_state), (wanted, bare))


def test_wrapper_inside_the_injection_has_the_injections_count() -> None:
    """Wrap what inject_hyperparams returns: around the wrapper it counts micro-batches,
    and its schedule moves with these.
    """
    schedule = optax.piecewise_constant_schedule(0.5, {1: 0.5})
    outside = optax.inject_hyperparams(
        lambda learning_rate: wrap(optax.sgd(learning_rate))
    )(learning_rate=schedule)
    _, state = train(outside, GRADS[:2])
    assert (state.count, gradaccum_jax.result(state).optimizer_step) == (2, 1)
    assert (
        train(
            wrap(optax.inject_hyperparams(optax.sgd)(learning_rate=schedule)), GRADS[:2]
        )[1].inner_state.count
        == 1
    )


def test_apply_if_finite_inside_sees_finite_windows() -> None:
    """The wrapper skips the others by itself, so the parameters go the same way, and
    only its own count tells.
    """
    bad = jax.tree.map(lambda g: g * jnp.nan, GRADS[1])
    inner = optax.apply_if_finite(optax.sgd(0.5, momentum=0.5), 3)
    moved, state = train(wrap(inner), [GRADS[0], bad, *GRADS[2:4]])
    wanted, bare = train(inner, [bad, MEANS[1]])
    assert_bitwise((moved, state.inner_state.inner_state), (wanted, bare.inner_state))
    assert (
        state.skipped_windows,
        state.inner_state.total_notfinite,
        bare.total_notfinite,
    ) == (1, 0, 1)


def test_apply_if_finite_around_drops_micro_batches() -> None:
    """A micro-batch that it rejects never reaches the window, which ends one
    micro-batch later.
    """
    bad = jax.tree.map(lambda g: g * jnp.inf, GRADS[1])
    moved, state = train(
        optax.apply_if_finite(wrap(optax.sgd(0.5, momentum=0.5)), 3),
        [GRADS[0], bad, *GRADS[1:4]],
    )
    assert_bitwise(moved, train(optax.sgd(0.5, momentum=0.5), MEANS[:2])[0])
    assert (state.total_notfinite, gradaccum_jax.result(state).optimizer_step) == (1, 2)


@pytest.mark.parametrize("reset_state", [False, True])
def test_lookahead_around_counts_micro_batches(reset_state: bool) -> None:
    """Its sync_period is times `steps`; then it syncs at the ends of windows, as around
    the bare optimizer on large batches.
    """
    pair = optax.LookaheadParams.init_synced(PARAMS)
    ours = optax.lookahead(
        wrap(optax.sgd(0.5, momentum=0.5)), 2 * STEPS, 0.5, reset_state
    )
    theirs = optax.lookahead(optax.sgd(0.5, momentum=0.5), 2, 0.5, reset_state)
    assert_close(train(ours, GRADS, pair)[0], train(theirs, MEANS, pair)[0])


def test_lookahead_that_resets_makes_integers_of_flags() -> None:
    """It multiplies the state by 0 or 1. The wrapper's decisions are the same on such
    flags.
    """
    pair, seen = optax.LookaheadParams.init_synced(PARAMS), []
    for reset_state in (False, True):
        tx = optax.lookahead(
            wrap(optax.sgd(0.5), loss_scale=gradaccum.DynamicLossScale(init_scale=4.0)),
            8,
            0.5,
            reset_state,
        )
        params, state, results = pair, tx.init(pair), []
        for factor in (1.0, jnp.inf, 2.0, 3.0):
            gradient = jax.tree.map(
                lambda p, f=factor, s=state.fast_state.loss_scale: jnp.full_like(
                    p, f * s
                ),
                PARAMS,
            )
            updates, state = tx.update(gradient, state, params)
            params = optax.apply_updates(params, updates)
            results.append([float(field) for field in gradaccum_jax.result(state)])
        seen.append((results, params))
    np.testing.assert_array_equal(seen[0][0], seen[1][0])
    assert_bitwise(seen[0][1], seen[1][1])
    assert state.fast_state.overflow.dtype == jnp.int32


def test_sam_inside_takes_two_windows() -> None:
    """The first window makes the adversarial step, the second the true one: as two
    large batches.
    """
    inner = optax.contrib.sam(
        optax.sgd(0.5), optax.chain(optax.contrib.normalize(), optax.sgd(0.1))
    )
    moved, state = train(wrap(inner), GRADS)
    wanted, bare = train(inner, MEANS)
    assert_close((moved, state.inner_state), (wanted, bare))


def test_reduce_on_plateau_around_averages_a_windows_losses() -> None:
    """accumulation_size=steps makes it judge the mean loss of a window, at the window's
    end.
    """
    losses = [4.0, 2.0, 5.0, 3.0, 6.0, 4.0, 7.0, 5.0]
    means = [(a + b) / 2 for a, b in zip(losses[::2], losses[1::2], strict=True)]

    def plateau(size: int) -> Any:
        return optax.contrib.reduce_on_plateau(
            factor=0.5, patience=1, accumulation_size=size
        )

    def run(tx: Any, grads: Any, values: Any) -> Any:
        params, state, update = PARAMS, tx.init(PARAMS), jax.jit(tx.update)
        for gradient, value in zip(grads, values, strict=True):
            updates, state = update(gradient, state, params, value=value)
            params = optax.apply_updates(params, updates)
        return params, state[1].scale

    ours = run(optax.chain(wrap(optax.sgd(0.5)), plateau(STEPS)), GRADS, losses)
    theirs = run(optax.chain(optax.sgd(0.5), plateau(1)), MEANS, means)
    assert theirs[1] < 0.5
    assert_close(ours, theirs)


def test_value_and_update_passes_the_loss_on() -> None:
    """Momo reads the loss of the large batch, and the call knows it."""
    x = jnp.arange(24.0).reshape(8, 3) / 8

    def loss(params: Any, x: Any) -> Any:
        return jnp.mean((x @ params["w"] + params["b"][0] - 1) ** 2)

    inner = optax.contrib.momo(learning_rate=0.1)
    tx = gradaccum.wrap(inner, steps=None)
    value, updates, state = gradaccum_jax.value_and_update(loss, tx, steps=4)(
        PARAMS, tx.init(PARAMS), x
    )
    wanted_value, gradient = jax.value_and_grad(loss)(PARAMS, x)
    wanted, held = inner.update(
        gradient, inner.init(PARAMS), PARAMS, value=wanted_value
    )
    assert_close((value, updates, state.inner_state), (wanted_value, wanted, held))
    other, *_ = gradaccum_jax.value_and_update(loss, tx, steps=4)(
        PARAMS, tx.init(PARAMS), x, value=2.0
    )[1:2]
    assert_close(
        other, inner.update(gradient, inner.init(PARAMS), PARAMS, value=2.0)[0]
    )


def test_line_search_on_a_split_batch() -> None:
    """A line search asks for the loss of the same batch again and again: split the
    batch, and use the bare optimizer.
    """
    x = jnp.asarray(np.random.default_rng(0).normal(size=(8, 3)), jnp.float32)

    def loss(params: Any, x: Any) -> Any:
        return jnp.mean((x @ params["w"] + params["b"][0] - 1) ** 2)

    def minimised(value_and_grad: Any) -> Any:
        tx, params = optax.lbfgs(), PARAMS
        state = tx.init(params)
        for _ in range(2):
            value, gradient = value_and_grad(params, x)
            value_fn = lambda params: value_and_grad(params, x)[0]  # noqa: E731
            updates, state = tx.update(
                gradient, state, params, value=value, grad=gradient, value_fn=value_fn
            )
            params = optax.apply_updates(params, updates)
        return params

    ours = jax.jit(lambda: minimised(gradaccum_jax.value_and_grad(loss, steps=4)))()
    theirs = jax.jit(lambda: minimised(jax.value_and_grad(loss)))()
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5),
        ours,
        theirs,
    )


def test_multisteps_hands_over_the_last_value() -> None:
    """As optax's class, whose place it takes; `gradaccum.wrap` refuses such an
    argument.
    """
    inner = optax.contrib.momo(learning_rate=0.1)
    for kind in (gradaccum_jax.MultiSteps, optax.MultiSteps):
        steps = kind(inner, 2)
        state = steps.init(PARAMS)
        for gradient, value in zip(GRADS[:2], (8.0, 2.0), strict=True):
            updates, state = steps.update(gradient, state, PARAMS, value=value)
        assert_close(
            updates, inner.update(MEANS[0], inner.init(PARAMS), PARAMS, value=2.0)[0]
        )


def test_accumulating_optimizers_inside_are_refused() -> None:
    for inner in (
        optax.MultiSteps(optax.sgd(0.1), 2),
        gradaccum_jax.MultiSteps(optax.sgd(0.1), 2),
    ):
        with pytest.raises(gradaccum.ArgumentTypeError, match="not wrapped"):
            wrap(optax.chain(optax.clip(1.0), inner.gradient_transformation())).init(
                PARAMS
            )


def test_ema_of_parameters_counts_updates() -> None:
    """`optax.ema` behind the wrapper would average zeros; inside it, and over the
    parameters when `applied`, it counts updates.
    """
    inner = optax.chain(optax.sgd(0.5), optax.ema(0.5))
    assert_bitwise(train(wrap(inner), GRADS)[0], train(inner, MEANS)[0])
    assert_bitwise(
        averaged(wrap(optax.sgd(0.5)), GRADS), averaged(optax.sgd(0.5), MEANS)
    )


def averaged(tx: Any, grads: Any) -> Any:
    params, state, average = PARAMS, tx.init(PARAMS), PARAMS
    for gradient in grads:
        updates, state = tx.update(gradient, state, params)
        params = optax.apply_updates(params, updates)
        applied = (
            gradaccum_jax.result(state).applied
            if isinstance(state, gradaccum_jax.AccumulationState)
            else True
        )
        average = jax.tree.map(
            lambda a, p, applied=applied: jnp.where(applied, 0.5 * a + 0.5 * p, a),
            average,
            params,
        )
    return average
