"""float32 masters: they train as float32 parameters do, wrong arguments are refused, and a compiled step holds no further copy."""

from __future__ import annotations

import functools
import re
from typing import Any

import numpy as np
import pytest

pytest.importorskip("optax", reason="optax is not installed")
import jax
import jax.numpy as jnp
import optax

import gradaccum
import gradaccum_jax
from gradaccum_jax.parameters import in_place_of

HALVES = {"float16": jnp.float16, "bfloat16": jnp.bfloat16}
by_half = pytest.mark.parametrize("name", HALVES)

SIDE, MATRICES = 1024, 4
ELEMENTS = MATRICES * SIDE * SIDE
PARAMS = {
    "embedding": jnp.asarray([[1.0, -2.0]]),
    "layer": {"w": jnp.asarray([1.0, -0.0, 3.0], jnp.bfloat16), "frozen": None, "count": jnp.asarray(3)},
    "head": jnp.asarray([0.5], jnp.float16),
}
GRADS = {
    "embedding": jnp.asarray([[0.5, 1.0]]),
    "layer": {"w": jnp.asarray([1.0, 2.0, -1.0], jnp.bfloat16), "frozen": None, "count": np.zeros((), jax.dtypes.float0)},
    "head": jnp.asarray([0.25], jnp.float16),
}


def wrap(inner: Any, **options: Any) -> Any:
    return gradaccum.wrap(inner, **{"steps": 2, "master_weights": True, **options})


def through_loop(params: Any, state: Any, tx: Any, count: int) -> Any:
    for _ in range(count):
        updates, state = tx.update(GRADS, state, params)
        params = optax.apply_updates(params, updates)
    return params, state


def through_jit(params: Any, state: Any, tx: Any, count: int) -> Any:
    @jax.jit
    def step(params: Any, state: Any) -> Any:
        updates, state = tx.update(GRADS, state, params)
        return optax.apply_updates(params, updates), state

    for _ in range(count):
        params, state = step(params, state)
    return params, state


def through_scan(params: Any, state: Any, tx: Any, count: int) -> Any:
    def body(carry: Any, _: Any) -> Any:
        updates, state = tx.update(GRADS, carry[1], carry[0])
        return (optax.apply_updates(carry[0], updates), state), None

    return jax.lax.scan(body, (params, state), length=count)[0]


def through_vmap(params: Any, state: Any, tx: Any, count: int) -> Any:
    def member(params: Any, state: Any) -> Any:
        return through_scan(params, state, tx, count)

    batched = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (3, *jnp.shape(leaf))), (params, state))
    return jax.tree.map(lambda leaf: leaf[1], jax.vmap(member)(*batched))


@functools.cache
def float32_training() -> Any:
    """Return the parameters and the state after 21 micro-batches with float32 parameters and no masters."""
    params, grads = jax.tree.map(lambda leaf: leaf.astype(jnp.float32) if leaf.dtype.itemsize == 2 else leaf, (PARAMS, GRADS))
    bare = gradaccum.wrap(optax.adamw(1e-3), steps=2)
    return through_scan(params, bare.init(params), given(bare, grads), 21)


@pytest.mark.parametrize("run", [through_loop, through_jit, through_scan, through_vmap])
def test_mixed_dtypes_train_as_float32(run: Any) -> None:
    """The masters go the way of float32 parameters, and each parameter is its rounded master."""
    tx = wrap(optax.adamw(1e-3))
    params, state = run(PARAMS, tx.init(PARAMS), tx, 21)
    held, other = float32_training()
    assert state.optimizer_step == other.optimizer_step == 10
    masters = in_place_of(params, state.masters)
    for got, master, wide in zip(*map(jax.tree.leaves, (params, masters, held)), strict=True):
        assert np.asarray(got).tobytes() == np.asarray(master.astype(got.dtype)).tobytes()
        np.testing.assert_allclose(master, wide, rtol=1e-5)  # XLA fuses the two programs differently.
    for got, expected in zip(jax.tree.leaves(state.inner_state), jax.tree.leaves(other.inner_state), strict=True):
        assert got.dtype == expected.dtype
        np.testing.assert_allclose(got, expected, rtol=1e-5)


def given(tx: Any, grads: Any) -> Any:
    """Return `tx` as a transformation that takes `grads` in place of every gradient."""
    return optax.GradientTransformationExtraArgs(tx.init, lambda _, state, params: tx.update(grads, state, params))


def test_masters_exist_for_halves_only() -> None:
    """float32 parameters and integers have none."""
    state = wrap(optax.adam(0.1)).init(PARAMS)
    assert [leaf.dtype for leaf in jax.tree.leaves(state.masters)] == [jnp.float32] * 2
    assert state.masters["embedding"] is None
    assert state.masters["layer"]["count"] is None
    assert {leaf.dtype for leaf in jax.tree.leaves(state.inner_state)} == {jnp.dtype("int32"), jnp.dtype("float32")}
    assert jax.tree.leaves(gradaccum.wrap(optax.adam(0.1), steps=2).init(PARAMS).masters) == []


def test_masked_wrapper_masters_its_part() -> None:
    params = {"a": jnp.ones(2, jnp.bfloat16), "b": jnp.ones(3, jnp.bfloat16)}
    tx = optax.masked(wrap(optax.sgd(2.0**-12), steps=1), {"a": True, "b": False})
    state = tx.init(params)
    assert [leaf.shape for leaf in jax.tree.leaves(state.inner_state.masters)] == [(2,)]
    grads = jax.tree.map(lambda p: -jnp.ones_like(p), params)
    for _ in range(64):
        updates, state = tx.update(grads, state, params)
        params = {**params, "a": optax.apply_updates(params, updates)["a"]}
    np.testing.assert_array_equal(params["a"], np.float32(1 + 64 * 2.0**-12))


@pytest.mark.parametrize("close", ["update", "flush"])
def test_parameters_are_required(close: str) -> None:
    tx = wrap(optax.sgd(1.0))
    state = tx.init(PARAMS)
    calls = {"update": lambda p: tx.update(GRADS, state, p), "flush": lambda p: gradaccum_jax.flush(tx, state, p)}
    with pytest.raises(gradaccum.ArgumentTypeError, match=r"params: expected .*master_weights=True"):
        calls[close](None)
    with pytest.raises(gradaccum.ArgumentValueError, match="params: expected half-precision parameters of these shapes"):
        calls[close](jax.tree.map(lambda leaf: leaf.astype(jnp.float32), PARAMS))


def compiled_step(tx: Any, params: Any) -> Any:
    def step(params: Any, state: Any, grads: Any) -> Any:
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return jax.jit(step, donate_argnums=(0, 1)).lower(params, jax.eval_shape(tx.init, params), params).compile()


def copies(compiled: Any) -> int:
    return len(re.findall(rf"= \w+\[{SIDE},{SIDE}\]\S* copy\(", compiled.as_text()))


@by_half
@pytest.mark.parametrize("options", [{}, {"clip_norm": 1.0, "on_overflow": "drop_micro_batch", "loss_scale": 8}], ids=["plain", "options"])
def test_wrapping_adds_only_the_sum(name: str, options: dict[str, Any]) -> None:
    """With everything donated: one float32 sum in place, and no scratch or copy beyond those of the bare half-precision optimizer."""
    inner = optax.sgd(0.1, momentum=0.9)
    params = {f"w{i}": jnp.ones((SIDE, SIDE), HALVES[name]) for i in range(MATRICES)}
    bare, wrapped = compiled_step(inner, params), compiled_step(gradaccum.wrap(inner, steps=4, **options), params)
    before, after = bare.memory_analysis(), wrapped.memory_analysis()
    assert after.alias_size_in_bytes >= before.alias_size_in_bytes + 4 * ELEMENTS
    assert after.output_size_in_bytes <= before.output_size_in_bytes + 4 * ELEMENTS + 1024
    # XLA before JAX 0.10 copies each bfloat16 array once more on a CPU, one after the other.
    copied = name == "bfloat16" and jax.__version_info__ < (0, 10)
    assert after.temp_size_in_bytes <= before.temp_size_in_bytes + 2 * ELEMENTS + (2 * SIDE**2 + 1024) * copied
    assert copies(wrapped) <= copies(bare) + MATRICES * copied


@by_half
@pytest.mark.parametrize(("inner", "scratch"), [(optax.sgd(0.1, momentum=0.9), 0.5), (optax.adamw(1e-3), 1.0)], ids=["momentum", "adamw"])
def test_masters_add_no_further_copy(name: str, inner: Any, scratch: float) -> None:
    """Parameters take 2 bytes, sums 4, masters 4, moments 4 each, all in place. Scratch is the mean gradient, if `inner` reads it twice."""
    params = {f"w{i}": jnp.ones((SIDE, SIDE), HALVES[name]) for i in range(MATRICES)}
    compiled = compiled_step(wrap(inner, steps=4), params)
    moments = sum(leaf.ndim == 2 for leaf in jax.tree.leaves(jax.eval_shape(inner.init, params))) // MATRICES
    expected = (2 + 4 + 4 + 4 * moments) * ELEMENTS
    memory = compiled.memory_analysis()
    assert expected <= memory.alias_size_in_bytes <= memory.output_size_in_bytes <= expected + 1024
    assert memory.temp_size_in_bytes <= scratch * 4 * ELEMENTS + 4096
    assert copies(compiled) == 0
