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

from .jax_epoch import (
    FEATURES,
    LARGE_BATCHES,
    MICRO_BATCHES,
    STEPS,
    assert_close,
)

jmp = pytest.importorskip("jmp", reason="jmp is not installed")

INNER = optax.adamw(0.05)


def loss(params: Any, x: Any, y: Any) -> Any:
    return jnp.mean((x @ params["w"] + params["b"] - y) ** 2)


def test_jmp_scale_in_the_loop() -> None:
    """A micro-batch that the loop of jmp rejects never reaches the window. Its scale may
    move in mid-window, as it unscales each gradient first.
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

    start = {"w": jnp.linspace(-1, 1, FEATURES)[:, None], "b": jnp.zeros(1)}
    scale = jmp.DynamicLossScale(jnp.asarray(2.0**6), period=2)
    params, state, scales = start, tx.init(start), set()
    first, *rest = MICRO_BATCHES[: 2 * STEPS]
    for x, y in [first, (np.full_like(first[0], np.inf), first[1]), *rest]:
        params, state, scale = step(params, state, scale, x, y)
        scales.add(float(scale.loss_scale))
    assert (state.optimizer_step, state.skipped_windows) == (2, 0)
    assert len(scales) > 2
    bare, bare_state = start, INNER.init(start)
    for x, y in LARGE_BATCHES[:2]:
        updates, bare_state = INNER.update(jax.grad(loss)(bare, x, y), bare_state, bare)
        bare = optax.apply_updates(bare, updates)
    assert_close(params, bare, 1e-6)
