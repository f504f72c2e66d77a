"""JAX's modes and transformations around a wrapped optimizer with the default control flow."""

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

PARAMS = {"w": jnp.ones((2, 3)), "b": jnp.ones(3)}
MAKERS = [lambda inner: gradaccum.wrap(inner, steps=2, clip_norm=1.0), lambda inner: gradaccum_jax.MultiSteps(inner, 2)]


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


@pytest.mark.parametrize("make", [MAKERS[1], lambda inner: gradaccum.wrap(inner, steps=2)], ids=["multisteps", "wrap"])
def test_reverse_mode_matches_forward_mode(make: Any) -> None:
    def loss(gradient: Any) -> Any:
        params, tx = PARAMS, make(optax.adam(0.1))
        state = tx.init(params)
        for _ in range(2):
            updates, state = tx.update(jax.tree.map(lambda leaf: gradient * leaf, params), state, params)
            params = optax.apply_updates(params, updates)
        return sum(jnp.sum((leaf - 2) ** 3) for leaf in jax.tree.leaves(params))

    forward = jax.jvp(loss, (jnp.float32(1e-8),), (jnp.float32(1),))[1]
    assert forward != 0
    np.testing.assert_allclose(jax.jit(jax.grad(loss))(jnp.float32(1e-8)), forward, rtol=1e-4)


@pytest.mark.parametrize("phases", [[1, 1, 1], [0, 1, 0]], ids=["together", "apart"])
@pytest.mark.parametrize("outer", ["grad of vmap", pytest.param("vmap of grad", marks=pytest.mark.deep)])
def test_reverse_mode_under_vmap(outer: str, phases: list[int]) -> None:
    """A member in mid-window adds nothing to the derivative, though that of its update, sqrt at 0, would be inf."""
    starts, counts = jnp.arange(3.0), jnp.array(phases, jnp.int32)

    def found(control_flow: str) -> Any:
        root = optax.stateless(lambda updates, params: jax.tree.map(jnp.sqrt, updates))
        tx = gradaccum.wrap(root, steps=2, control_flow=control_flow)

        def loss(rate: Any, start: Any, count: Any) -> Any:
            state = tx.init(start)._replace(micro_step=count)
            updates, _ = tx.update(rate * start, state, start)
            return (start + updates) ** 2

        if outer == "vmap of grad":
            return jax.vmap(jax.grad(loss), (None, 0, 0))(jnp.float32(0.5), starts, counts)
        return jax.grad(lambda rate: jax.vmap(loss, (None, 0, 0))(rate, starts, counts).sum())(jnp.float32(0.5))

    by_conditional = found("cond")
    assert np.any(by_conditional != 0)
    np.testing.assert_allclose(found("while_loop"), by_conditional, rtol=1e-6)
