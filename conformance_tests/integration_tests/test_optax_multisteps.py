"""optax's own tests of its multi-step wrapper, run on `gradaccum_jax.MultiSteps`.

The framework's tests compare it with optax's class after every mini-step. Here are the behaviours that optax's own tests hold, with numbers
of our own.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest

pytest.importorskip("optax", reason="optax is not installed")
import jax
import jax.numpy as jnp
import optax

import gradaccum_jax

PARAMS = {"w": jnp.asarray([2.0, -4.0]), "b": jnp.asarray(1.0)}


def stepped(steps: Any, grads: Any, params: Any = PARAMS) -> Any:
    """The parameters, the state and `has_updated` after each mini-step."""
    tx, state, held = steps.gradient_transformation(), steps.init(params), []
    update = jax.jit(tx.update)
    for gradient in grads:
        updates, state = update(gradient, state, params)
        params = optax.apply_updates(params, updates)
        held.append((params, state, bool(steps.has_updated(state))))
    return held


def tree(value: float) -> Any:
    return jax.tree.map(lambda p: jnp.full_like(p, value), PARAMS)


def test_mean_is_applied_and_nothing_before() -> None:
    steps = gradaccum_jax.MultiSteps(optax.scale(1.0), 4)
    assert not steps.has_updated(steps.init(PARAMS))
    held = stepped(steps, [tree(value) for value in (1, 3, 5, 11)])
    assert [updated for *_, updated in held] == [False, False, False, True]
    for params, *_ in held[:3]:
        jax.tree.map(np.testing.assert_array_equal, params, PARAMS)
    jax.tree.map(lambda p, start: np.testing.assert_array_equal(p, start + 5), held[-1][0], PARAMS)


def test_sum_is_applied_without_use_grad_mean() -> None:
    held = stepped(gradaccum_jax.MultiSteps(optax.scale(1.0), 3, use_grad_mean=False), [tree(value) for value in (1, 3, 5)])
    np.testing.assert_array_equal(held[-1][0]["w"], PARAMS["w"] + 9)


def test_schedule_is_a_function_of_gradient_step() -> None:
    """Two windows of one mini-step, then windows of three."""
    steps = gradaccum_jax.MultiSteps(optax.sgd(0.5), lambda step: jnp.where(step < 2, 1, 3))
    held = stepped(steps, [tree(1.0)] * 8)
    assert [updated for *_, updated in held] == [True, True, False, False, True, False, False, True]
    assert [int(state.gradient_step) for _, state, _ in held] == [1, 2, 2, 2, 3, 3, 3, 4]
    assert [int(state.mini_step) for _, state, _ in held] == [0, 0, 1, 2, 0, 1, 2, 0]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_rejected_mini_step_is_not_counted(bad: float) -> None:
    steps = gradaccum_jax.MultiSteps(optax.sgd(1.0), 2, should_skip_update_fn=optax.skip_not_finite)
    held = stepped(steps, [tree(value) for value in (1, 3, bad, 5, bad, 7)])
    assert [int(state.mini_step) for _, state, _ in held] == [1, 0, 0, 1, 1, 0]
    assert [bool(state.skip_state["should_skip"]) for _, state, _ in held] == [False, False, True, False, True, False]
    assert int(held[2][1].skip_state["num_not_finite"]) == 3
    np.testing.assert_array_equal(held[-1][0]["w"], PARAMS["w"] - 2 - 6)


def test_large_mini_step_is_rejected() -> None:
    def skip(updates: Any, step: Any, params: Any) -> Any:
        return optax.skip_large_updates(updates, step, params, max_squared_norm=100.0)

    held = stepped(gradaccum_jax.MultiSteps(optax.sgd(1.0), 2, should_skip_update_fn=skip), [tree(value) for value in (1, 6, 3)])
    assert [int(state.mini_step) for _, state, _ in held] == [1, 1, 0]
    assert float(held[1][1].skip_state["norm_squared"]) == 3 * 36
    np.testing.assert_array_equal(held[-1][0]["w"], PARAMS["w"] - 2)


def test_zero_nans_inside() -> None:
    """Its state changed its type in optax's wrapper once."""
    held = stepped(gradaccum_jax.MultiSteps(optax.chain(optax.zero_nans(), optax.sgd(1.0)), 2), [tree(np.nan), tree(4.0)])
    np.testing.assert_array_equal(held[-1][0]["w"], PARAMS["w"])
    assert bool(held[-1][1].inner_opt_state[0].found_nan["w"])


def test_flax_model_learns_at_window_ends_only() -> None:
    """An inner optimizer with a state, which reads the parameters."""
    linen = pytest.importorskip("flax.linen", reason="flax is not installed")
    model, x = linen.Dense(3), jnp.ones((4, 5))

    def loss(params: Any) -> Any:
        return jnp.sum(model.apply({"params": params}, x) ** 2)

    params = model.init(jax.random.key(0), x)["params"]
    inner = optax.chain(optax.scale_by_adam(), optax.add_decayed_weights(1e-2), optax.scale(-1e-2))
    steps = gradaccum_jax.MultiSteps(inner, 3)
    state, losses, step = steps.init(params), [float(loss(params))], jax.jit(lambda p, s: steps.update(jax.grad(loss)(p), s, p))
    for number in range(1, 10):
        updates, state = step(params, state)
        params = optax.apply_updates(params, updates)
        losses.append(float(loss(params)))
        assert losses[-1] < losses[-2] if number % 3 == 0 else losses[-1] == losses[-2]
        assert bool(steps.has_updated(state)) is (number % 3 == 0)


@pytest.mark.parametrize("name", ["adabelief", "adam", "adamw", "lamb", "lion", "rmsprop", "sgd", "yogi"])
def test_updates_have_the_bare_optimizers_dtypes(name: str) -> None:
    """For all pairs of the parameters' and the gradients' dtypes; the parameters keep theirs."""
    inner = getattr(optax, name)(0.1)
    steps = gradaccum_jax.MultiSteps(inner, 4)
    for held, given in product((jnp.float32, jnp.float16, jnp.bfloat16), repeat=2):
        params, grads = (jax.tree.map(lambda p, dtype=dtype: jax.ShapeDtypeStruct(p.shape, dtype), PARAMS) for dtype in (held, given))
        wanted, _ = jax.eval_shape(inner.update, grads, jax.eval_shape(inner.init, params), params)
        updates, state = jax.eval_shape(steps.update, grads, jax.eval_shape(steps.init, params), params)
        assert [leaf.dtype for leaf in jax.tree.leaves(updates)] == [leaf.dtype for leaf in jax.tree.leaves(wanted)]
        assert {leaf.dtype for leaf in jax.tree.leaves(state.acc_grads)} == {jnp.dtype("float32")}
        moved = jax.eval_shape(optax.apply_updates, params, updates)
        assert jax.tree.map(lambda leaf: leaf.dtype, moved) == jax.tree.map(lambda leaf: leaf.dtype, params)


@pytest.mark.parametrize("dtype", [None, jnp.float32, jnp.bfloat16])
def test_state_keeps_its_types_in_a_scan(dtype: Any) -> None:
    """Shape, dtype, weak type and sharding of each leaf are those that `init` made."""
    params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), PARAMS)
    steps = gradaccum_jax.MultiSteps(optax.adam(0.1), 2, accumulator_dtype=dtype)
    start = steps.init(params)
    state, _ = jax.jit(lambda state: jax.lax.scan(lambda state, _: steps.update(params, state, params)[::-1], state, None, length=4))(start)
    assert jax.tree.map(jax.typeof, state) == jax.tree.map(jax.typeof, start)
    assert {leaf.dtype for leaf in jax.tree.leaves(state.acc_grads)} == {jnp.dtype(dtype or jnp.float32)}
    assert (state.mini_step, state.gradient_step) == (0, 2)


def test_sums_lie_where_the_parameters_lie() -> None:
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",))
    placed = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    params = {"w": jax.device_put(PARAMS["w"], placed)}
    steps = gradaccum_jax.MultiSteps(optax.adam(0.1), 2)
    state = jax.jit(steps.init, in_shardings=placed, out_shardings=None)(params)
    assert jax.jit(steps.update)(params, state, params)[1].acc_grads["w"].sharding.is_equivalent_to(placed, 1)


def test_integers_and_none_among_the_parameters() -> None:
    params = {"w": jnp.ones(2), "count": jnp.asarray(3), "frozen": None}
    grads = {"w": jnp.ones(2), "count": np.zeros((), jax.dtypes.float0), "frozen": None}
    steps = gradaccum_jax.MultiSteps(optax.sgd(0.5), 2)
    state = steps.init(params)
    for number in range(2):
        updates, state = steps.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        np.testing.assert_array_equal(params["w"], [1.0, 1.0] if number == 0 else [0.5, 0.5])
    assert (params["count"], params["count"].dtype, params["frozen"]) == (3, jnp.int32, None)


def test_idle_updates_are_zeros() -> None:
    """Also where a gradient is large: nothing of it shines through before the window ends."""
    steps = gradaccum_jax.MultiSteps(optax.adam(0.1), 3)
    state = steps.init(PARAMS)
    for _ in range(2):
        updates, state = steps.update(tree(1e30), state, PARAMS)
        assert not any(np.any(leaf) for leaf in jax.tree.leaves(updates))
