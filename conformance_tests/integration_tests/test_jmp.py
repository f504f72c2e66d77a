"""jmp's loss scale in the loop beside the wrapper, which then has none."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("optax", reason="optax is not installed")
import jax
import jax.numpy as jnp
import optax

import gradaccum

from .jax_epoch import FEATURES, MICRO_BATCHES, STEPS, assert_close

jmp = pytest.importorskip("jmp", reason="jmp is not installed")

PARAMS = {
    "w": jnp.asarray(np.linspace(-1, 1, FEATURES)[:, None], jnp.float32),
    "b": jnp.zeros(1),
}
BATCHES = MICRO_BATCHES[: 2 * STEPS]
INNER = optax.adamw(0.05)


def loss(params: Any, x: Any, y: Any) -> Any:
    return jnp.mean((x @ params["w"] + params["b"] - y) ** 2)


def bare() -> Any:
    """The bare optimizer on the mean of each window's gradients."""
    params, state = PARAMS, INNER.init(PARAMS)
    for window in (BATCHES[:STEPS], BATCHES[STEPS:]):
        x, y = map(np.concatenate, zip(*window, strict=True))
        updates, state = INNER.update(jax.grad(loss)(params, x, y), state, params)
        params = optax.apply_updates(params, updates)
    return params


def test_jmp_scale_in_the_loop() -> None:
    """What the loop of jmp rejects never reaches the window. Its scale may move in
    mid-window, as it unscales each gradient first.
    """
    tx = gradaccum.wrap(INNER, steps=STEPS)

    @jax.jit
    def step(params: Any, state: Any, scale: Any, x: Any, y: Any) -> Any:
        grads = scale.unscale(jax.grad(lambda p: scale.scale(loss(p, x, y)))(params))
        finite = jmp.all_finite(grads)
        updates, moved = tx.update(grads, state, params)
        new = optax.apply_updates(params, updates), moved
        params, state = jmp.select_tree(finite, new, (params, state))
        return params, state, scale.adjust(finite)

    scale = jmp.DynamicLossScale(jnp.asarray(2.0**6), period=2)
    params, state, scales = PARAMS, tx.init(PARAMS), set()
    bad = (np.full_like(BATCHES[0][0], np.inf), BATCHES[0][1])
    for x, y in [BATCHES[0], bad, *BATCHES[1:]]:
        params, state, scale = step(params, state, scale, x, y)
        scales.add(float(scale.loss_scale))
    assert (state.optimizer_step, state.skipped_windows) == (2, 0)
    assert len(scales) > 2
    assert_close(params, bare(), 1e-6)
