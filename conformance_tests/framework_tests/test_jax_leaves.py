"""Unusual parameters: integers, flags, random keys, float8, and tree nodes with two
children of one key.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradaccum
import gradaccum_jax

MAKERS: dict[str, Callable[..., Any]] = {
    "wrap": gradaccum.wrap,
    "multisteps": gradaccum_jax.MultiSteps,
}
FLOAT0 = np.zeros((), jax.dtypes.float0)
STILL = {
    "count": jnp.asarray(16777217, jnp.int32),
    "key": jax.random.PRNGKey(123456789),
    "flag": jnp.asarray([True, False]),
    "byte": jnp.asarray(200, jnp.uint8),
}


@pytest.mark.parametrize(
    "inner",
    [optax.sgd(0.5, momentum=0.9), optax.adamw(0.5, weight_decay=0.5)],
    ids=["sgd", "adamw"],
)
@pytest.mark.parametrize("absent", [None, FLOAT0], ids=["none", "float0"])
@pytest.mark.parametrize("name", MAKERS)
def test_integers_and_flags_stay_bitwise(name: str, absent: Any, inner: Any) -> None:
    """No bit changes, also where float32 has gaps. Each update has the dtype of its
    parameter, so that optax casts none.
    """
    tx, params = MAKERS[name](inner, 2), {"w": jnp.ones(2), **STILL}
    grads, state = {"w": jnp.ones(2), **dict.fromkeys(STILL, absent)}, tx.init(params)
    for _ in range(4):
        updates, state = tx.update(grads, state, params)
        assert {name: updates[name].dtype for name in STILL} == {
            name: leaf.dtype for name, leaf in STILL.items()
        }
        params = optax.apply_updates(params, updates)
        for still, leaf in STILL.items():
            np.testing.assert_array_equal(params[still], leaf)
    assert np.all(np.asarray(params["w"]) < 0.5)


def test_flush_leaves_integers_alone() -> None:
    tx, params = (
        gradaccum.wrap(optax.adamw(0.5, weight_decay=0.5), steps=None),
        {"w": jnp.ones(2), **STILL},
    )
    updates, state = tx.update(
        {"w": jnp.ones(2), **dict.fromkeys(STILL)}, tx.init(params), params
    )
    for update in (updates, gradaccum_jax.flush(tx, state, params)[0]):
        params = optax.apply_updates(params, update)
        for still, leaf in STILL.items():
            np.testing.assert_array_equal(params[still], leaf)


@pytest.mark.parametrize("name", MAKERS)
def test_integer_gradient_is_refused(name: str) -> None:
    """JAX makes no integer gradients, and each optimizer would treat one in its own
    way.
    """
    tx, params = (
        MAKERS[name](optax.sgd(0.5), 2),
        {"w": jnp.ones(2), "count": jnp.asarray(3)},
    )
    with pytest.raises(
        gradaccum.GradientError,
        match=r"grads\['count'\]: .*takes no part.*Give None or float0",
    ):
        tx.update({"w": jnp.ones(2), "count": jnp.asarray(0)}, tx.init(params), params)


@pytest.mark.parametrize("absent", [None, FLOAT0], ids=["none", "float0"])
@pytest.mark.parametrize("name", MAKERS)
def test_typed_keys_have_no_update(name: str, absent: Any) -> None:
    """Nothing can be added to a random key. Plain optax also returns None for a
    gradient of None (its Adam refuses it).
    """
    tx, params = (
        MAKERS[name](optax.sgd(0.5), 2),
        {"key": jax.random.key(7), "w": jnp.ones(2)},
    )
    state = start = tx.init(params)
    for step in range(2):
        updates, state = jax.jit(tx.update)(
            {"key": None if step else absent, "w": jnp.ones(2)}, state, params
        )
        assert updates["key"] is None
    np.testing.assert_allclose(updates["w"], [-0.5, -0.5], rtol=1e-6)
    assert jax.tree.map(jax.typeof, state) == jax.tree.map(jax.typeof, start)


def test_typed_keys_beside_masters() -> None:
    tx = gradaccum.wrap(optax.sgd(0.5), steps=1, master_weights=True)
    params = {"key": jax.random.key(7), "w": jnp.ones(2, jnp.bfloat16)}
    updates, state = tx.update(
        {"key": None, "w": jnp.ones(2, jnp.bfloat16)}, tx.init(params), params
    )
    assert updates["key"] is None
    np.testing.assert_array_equal(state.masters["w"], [0.5, 0.5])
    np.testing.assert_array_equal(updates["w"], [-0.5, -0.5])


@pytest.mark.parametrize("name", MAKERS)
def test_float8_is_refused(name: str) -> None:
    """JAX adds nothing to it. A float8 gradient of a wider parameter is refused too,
    and what was accumulated stays.
    """
    tx, narrow = MAKERS[name](optax.sgd(0.5), 2), jnp.ones(2, jnp.float8_e4m3fn)
    with pytest.raises(
        gradaccum.ArgumentTypeError,
        match="params: expected parameters of 16 bits or more; got dtype float8_e4m3fn",
    ):
        tx.init(narrow)
    _, state = tx.update(jnp.ones(2), tx.init(jnp.ones(2)), jnp.ones(2))
    with pytest.raises(gradaccum.GradientError, match="one of dtype float8_e4m3fn"):
        tx.update(narrow, state, jnp.ones(2))
    assert tx.update(jnp.ones(2), state, jnp.ones(2))[0].any()


@pytest.mark.parametrize("name", MAKERS)
def test_numpys_memory_may_be_written_over(name: str) -> None:
    """JAX itself reads it after the call has returned."""
    tx, memory, params = (
        MAKERS[name](optax.sgd(1.0), 1),
        np.empty(2**20, np.float32),
        jnp.zeros(2**20),
    )
    state = tx.init(params)
    for step in range(10):
        memory[...] = step
        updates, state = tx.update(memory, state, params)
        memory[...] = -1.0
        np.testing.assert_array_equal(updates, -step)


class Pair:
    """A tree node that reports one key for both of its children."""

    def __init__(self, a: Any, b: Any) -> None:
        self.children = (a, b)


jax.tree_util.register_pytree_with_keys(
    Pair,
    lambda pair: (
        [(jax.tree_util.DictKey("same"), child) for child in pair.children],
        None,
    ),
    lambda _, children: Pair(*children),
)


@pytest.mark.parametrize("name", MAKERS)
def test_children_of_one_key_stay_apart(name: str) -> None:
    tx, params = MAKERS[name](optax.sgd(1.0), 1), Pair(jnp.zeros(1), jnp.zeros(1))
    for grads, expected in (
        (Pair(jnp.ones(1), jnp.full(1, 3.0)), [-1, -3]),
        (Pair(None, jnp.full(1, 3.0)), [0, -3]),
    ):
        updates, state = tx.update(grads, tx.init(params), params)
        assert [float(u[0]) for u in updates.children] == expected
    with pytest.raises(
        gradaccum.GradientError, match="the containers of the parameters"
    ):
        tx.update({"same": jnp.ones(1)}, state, params)


def test_children_of_one_key_are_checked() -> None:
    """`check_state` takes them by position, as they share a path."""
    tx, params = (
        gradaccum.wrap(optax.sgd(1.0), steps=2),
        Pair(jnp.zeros(1), jnp.zeros(1)),
    )
    _, state = tx.update(Pair(jnp.ones(1), jnp.full(1, 3.0)), tx.init(params), params)
    checked = gradaccum_jax.check_state(tx, state, params)
    assert [float(leaf[0]) for leaf in checked.accumulator.children] == [1, 3]


@pytest.mark.parametrize("name", MAKERS)
def test_zeros_of_complex_parameters_keep_their_signs(name: str) -> None:
    tx, params = MAKERS[name](optax.sgd(0.5), 2), jnp.asarray([complex(-0.0, -0.0)])
    updates, _ = tx.update(params, tx.init(params), params)
    after = np.asarray(optax.apply_updates(params, updates))
    assert np.signbit(after.real).all()
    assert np.signbit(after.imag).all()
