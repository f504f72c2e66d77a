"""optax's own tests of its multi-step wrapper, run on `gradaccum_jax.MultiSteps`.

The framework's tests compare it with optax's class after every mini-step. Here are the
behaviours that optax's own tests hold, with numbers of our own.
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


def test_zero_nans_inside() -> None:
    """Its state changed its type in optax's wrapper once."""
    held = stepped(
        gradaccum_jax.MultiSteps(optax.chain(optax.zero_nans(), optax.sgd(1.0)), 2),
        [tree(np.nan), tree(4.0)],
    )
    np.testing.assert_array_equal(held[-1][0]["w"], PARAMS["w"])
    assert bool(held[-1][1].inner_opt_state[0].found_nan["w"])


@pytest.mark.parametrize(
    "name", ["adabelief", "adam", "adamw", "lamb", "lion", "rmsprop", "sgd", "yogi"]
)
def test_updates_have_the_bare_optimizers_dtypes(name: str) -> None:
    """For all pairs of the parameters' and the gradients' dtypes; the parameters keep
    theirs.
    """
    inner = getattr(optax, name)(0.1)
    steps = gradaccum_jax.MultiSteps(inner, 4)
    for held, given in product((jnp.float32, jnp.float16, jnp.bfloat16), repeat=2):
        params, grads = (
            jax.tree.map(
                lambda p, dtype=dtype: jax.ShapeDtypeStruct(p.shape, dtype), PARAMS
            )
            for dtype in (held, given)
        )
        wanted, _ = jax.eval_shape(
            inner.update, grads, jax.eval_shape(inner.init, params), params
        )
        updates, state = jax.eval_shape(
            steps.update, grads, jax.eval_shape(steps.init, params), params
        )
        assert [leaf.dtype for leaf in jax.tree.leaves(updates)] == [
            leaf.dtype for leaf in jax.tree.leaves(wanted)
        ]
        assert {leaf.dtype for leaf in jax.tree.leaves(state.acc_grads)} == {
            jnp.dtype("float32")
        }
        moved = jax.eval_shape(optax.apply_updates, params, updates)
        assert jax.tree.map(lambda leaf: leaf.dtype, moved) == jax.tree.map(
            lambda leaf: leaf.dtype, params
        )


@pytest.mark.parametrize("dtype", [None, jnp.float32, jnp.bfloat16])
def test_state_keeps_its_types_in_a_scan(dtype: Any) -> None:
    """Shape, dtype, weak type and sharding of each leaf are those that `init` made."""
    params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), PARAMS)
    steps = gradaccum_jax.MultiSteps(optax.adam(0.1), 2, accumulator_dtype=dtype)
    start = steps.init(params)
    state, _ = jax.jit(
        lambda state: jax.lax.scan(
            lambda state, _: steps.update(params, state, params)[::-1],
            state,
            None,
            length=4,
        )
    )(start)
    assert jax.tree.map(jax.typeof, state) == jax.tree.map(jax.typeof, start)
    assert {leaf.dtype for leaf in jax.tree.leaves(state.acc_grads)} == {
        jnp.dtype(dtype or jnp.float32)
    }
    assert (state.mini_step, state.gradient_step) == (0, 2)


def test_sums_lie_where_the_parameters_lie() -> None:
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",))
    placed = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    params = {"w": jax.device_put(PARAMS["w"], placed)}
    steps = gradaccum_jax.MultiSteps(optax.adam(0.1), 2)
    state = jax.jit(steps.init, in_shardings=placed, out_shardings=None)(params)
    assert (
        jax.jit(steps.update)(params, state, params)[1]
        .acc_grads["w"]
        .sharding.is_equivalent_to(placed, 1)
    )


def test_integers_and_none_among_the_parameters() -> None:
    params = {"w": jnp.ones(2), "count": jnp.asarray(3), "frozen": None}
    grads = {"w": jnp.ones(2), "count": np.zeros((), jax.dtypes.float0), "frozen": None}
    steps = gradaccum_jax.MultiSteps(optax.sgd(0.5), 2)
    state = steps.init(params)
    for number in range(2):
        updates, state = steps.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        np.testing.assert_array_equal(
            params["w"], [1.0, 1.0] if number == 0 else [0.5, 0.5]
        )
    assert (params["count"], params["count"].dtype, params["frozen"]) == (
        3,
        jnp.int32,
        None,
    )
