"""jmp's policies under the wrapper, and jmp's loss scale beside it: a loop has one of
the two scales.
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

from .jax_epoch import FEATURES, MICRO_BATCHES, STEPS, assert_bitwise, assert_close

jmp = pytest.importorskip("jmp", reason="jmp is not installed")

PARAMS = {
    "w": jnp.asarray(np.linspace(-1, 1, FEATURES)[:, None], jnp.float32),
    "b": jnp.zeros(1),
}
BATCHES = MICRO_BATCHES[: 2 * STEPS]


def loss_under(policy: Any) -> Any:
    def loss(params: Any, x: Any, y: Any) -> Any:
        params, x, y = policy.cast_to_compute(
            (params, jnp.asarray(x, jnp.float32), jnp.asarray(y, jnp.float32))
        )
        return policy.cast_to_output(jnp.mean((x @ params["w"] + params["b"] - y) ** 2))

    return loss


def bare(loss: Any, inner: Any, windows: Any) -> Any:
    """The bare optimizer on the float32 mean of each window's gradients."""
    params, state = PARAMS, inner.init(PARAMS)
    for window in windows:
        grads = [jax.grad(loss)(params, *batch) for batch in window]
        mean = jax.tree.map(lambda *leaves: sum(leaves) / len(leaves), *grads)
        updates, state = inner.update(mean, state, params)
        params = optax.apply_updates(params, updates)
    return params


@pytest.mark.parametrize("compute", ["float32", "bfloat16", "float16"])
def test_policy_with_our_scale(compute: str) -> None:
    """Parameters and sums in float32, the loss in the compute dtype; a scale of a power
    of two changes no bit that float16 holds.
    """
    loss, inner = (
        loss_under(jmp.get_policy(f"params=float32,compute={compute},output=float32")),
        optax.adamw(0.05),
    )
    tx = gradaccum.wrap(
        inner, steps=STEPS, loss_scale=gradaccum.DynamicLossScale(init_scale=2.0**6)
    )

    @jax.jit
    def step(params: Any, state: Any, x: Any, y: Any) -> Any:
        updates, state = tx.update(
            jax.grad(lambda p: gradaccum_jax.scale_loss(loss(p, x, y), state))(params),
            state,
            params,
        )
        return optax.apply_updates(params, updates), state

    params, state = PARAMS, tx.init(PARAMS)
    for x, y in BATCHES:
        params, state = step(params, state, x, y)
    assert state.optimizer_step == 2
    tolerance = {"float32": 1e-6, "bfloat16": 2e-2, "float16": 2e-3}[compute]
    assert_close(
        params, bare(loss, inner, (BATCHES[:STEPS], BATCHES[STEPS:])), tolerance
    )


def test_jmp_scale_in_the_loop() -> None:
    """What the loop of jmp rejects never reaches the window. Its scale may move in
    mid-window, as it unscales each gradient first.
    """
    loss, inner = loss_under(jmp.get_policy("full")), optax.adamw(0.05)
    tx = gradaccum.wrap(inner, steps=STEPS)

    @jax.jit
    def step(params: Any, state: Any, scale: Any, x: Any, y: Any) -> Any:
        grads = scale.unscale(jax.grad(lambda p: scale.scale(loss(p, x, y)))(params))
        finite = jmp.all_finite(grads)
        updates, moved = tx.update(grads, state, params)
        params, state = jmp.select_tree(
            finite, (optax.apply_updates(params, updates), moved), (params, state)
        )
        return params, state, scale.adjust(finite)

    scale = jmp.DynamicLossScale(jnp.asarray(2.0**6), period=2)
    params, state, scales = PARAMS, tx.init(PARAMS), []
    bad = (np.full_like(BATCHES[0][0], np.inf), BATCHES[0][1])
    for x, y in [BATCHES[0], bad, *BATCHES[1:]]:
        before = state
        params, state, scale = step(params, state, scale, x, y)
        scales.append(float(scale.loss_scale))
        if x is bad[0]:
            assert_bitwise(state, before)
    assert state.optimizer_step == 2
    assert len(set(scales)) > 2
    assert_close(params, bare(loss, inner, (BATCHES[:STEPS], BATCHES[STEPS:])), 1e-6)


@pytest.mark.parametrize(
    "scale",
    [
        jmp.DynamicLossScale(jnp.asarray(8.0)),
        jmp.StaticLossScale(8.0),
        jmp.NoOpLossScale(),
    ],
)
def test_jmp_scale_as_our_option_is_refused(scale: Any) -> None:
    """The scale of jmp adjusts per micro-batch; the wrapper's moves between windows."""
    with pytest.raises(
        gradaccum.ArgumentTypeError, match=r"^loss_scale: .*DynamicLossScale"
    ):
        gradaccum.wrap(optax.sgd(0.1), steps=2, loss_scale=scale)
