"""The program that XLA gets: control flow runs the inner optimizer once per window, and the state keeps its types."""

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


def counting(runs: list[int]) -> optax.GradientTransformation:
    """Return SGD that notes each run on the host, a whole vmapped batch as one run."""

    def note(batch: Any) -> Any:
        runs.append(np.ndim(batch))
        return np.zeros(np.shape(batch), np.float32)

    def update(gradients: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        first = jax.tree.leaves(gradients)[0].ravel()[0]
        zero = jax.pure_callback(note, jax.ShapeDtypeStruct((), jnp.float32), first, vmap_method="expand_dims")
        return jax.tree.map(lambda g: zero - 0.5 * g, gradients), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def test_vmapped_members_share_one_run() -> None:
    runs: list[int] = []
    tx = gradaccum.wrap(counting(runs), steps=4)
    params = {"w": jnp.ones((5, 3))}
    state = jax.vmap(tx.init)(params)
    update = jax.jit(jax.vmap(lambda g, s, p: tx.update({"w": g}, s, p)))
    for step in range(8):
        updates, state = update(jnp.full((5, 3), step + 1.0), state, params)
        jax.block_until_ready(state)
        assert runs == [1] * ((step + 1) // 4)
    np.testing.assert_array_equal(updates["w"], np.full((5, 3), -0.5 * 6.5))


def test_vmapped_members_close_windows_apart() -> None:
    tx = gradaccum.wrap(optax.sgd(1.0), steps=2)
    params = {"w": jnp.zeros((2, 1))}
    state = jax.vmap(tx.init)(params)
    state = state._replace(micro_step=jnp.asarray([0, 1], jnp.int32), weight=jnp.asarray([0.0, 1.0]))
    updates, state = jax.vmap(tx.update)({"w": jnp.asarray([[3.0], [8.0]])}, state, params)
    np.testing.assert_array_equal(updates["w"], [[0.0], [-4.0]])
    np.testing.assert_array_equal(gradaccum_jax.result(state).applied, [False, True])
    updates, state = jax.vmap(tx.update)({"w": jnp.asarray([[5.0], [7.0]])}, state, params)
    np.testing.assert_array_equal(updates["w"], [[-4.0], [0.0]])
    assert float(state.accumulator["w"][1, 0]) == 7.0


def test_step_is_differentiable() -> None:
    tx = gradaccum.wrap(optax.sgd(0.5), steps=1)
    state = tx.init(jnp.ones(()))
    assert jax.grad(lambda g: tx.update(g, state)[0] ** 2)(3.0) == pytest.approx(2 * 0.25 * 3.0)


def test_step_outside_jit_compiles_once() -> None:
    traces: list[int] = []

    def update(gradients: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        traces.append(1)
        return gradients, state

    tx = gradaccum.wrap(optax.GradientTransformation(lambda params: optax.EmptyState(), update), steps=2)
    params = jnp.ones(3)
    _, state = tx.update(params, tx.init(params), params)
    after_first = len(traces)
    for _ in range(5):
        _, state = tx.update(params, state, params)
    assert len(traces) == after_first > 0


@pytest.mark.parametrize("options", [{}, {"on_overflow": "drop_micro_batch", "loss_scale": 8}, {"steps": [(0, 2), (1, 3)]}])
@pytest.mark.parametrize("weight", [None, 2.0])
def test_state_types_hold_still(options: dict[str, Any], weight: float | None) -> None:
    tx = gradaccum.wrap(optax.inject_hyperparams(optax.adamw)(learning_rate=0.1), **{"steps": 2, **options})
    params = {"w": jnp.ones((2, 3)), "half": jnp.ones(2, jnp.bfloat16), "scalar": 1.0}
    start = tx.init(params)
    kinds = jax.tree.map(jax.typeof, start)
    for kind in jax.tree.leaves(kinds):
        assert not kind.weak_type
    grads = {"w": jnp.ones((2, 3)), "half": jnp.ones(2, jnp.bfloat16), "scalar": 2.0}
    for step in (
        lambda: tx.update(grads, start, params, weight=weight)[1],
        lambda: gradaccum_jax.flush(tx, start, params)[1],
        lambda: gradaccum_jax.discard(tx, start),
    ):
        assert jax.tree.map(jax.typeof, step()) == kinds
