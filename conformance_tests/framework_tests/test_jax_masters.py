"""float32 masters: each parameter reaches its rounded master, and a compiled step holds
no further copy.
"""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from numpy.testing import assert_array_equal

import gradaccum
import gradaccum_jax
from gradaccum_jax.master_weights import distance

HALVES = {"float16": jnp.float16, "bfloat16": jnp.bfloat16}
RANGE = {"float16": (2.0**-24, 65504.0), "bfloat16": (2.0**-110, 2.0**127)}
"""Of bfloat16 the smallest are left out: XLA may flush their differences to 0."""
LARGEST_RATIO = {"float16": 4092, "bfloat16": 32764}
by_half = pytest.mark.parametrize("name", HALVES)
PARAMS = {
    "embedding": jnp.asarray([[1.0, -2.0]]),
    "w": jnp.asarray([1.0, -0.0, 3.0], jnp.bfloat16),
    "frozen": None,
    "count": jnp.asarray(3),
    "head": jnp.asarray([0.5], jnp.float16),
}
GRADS = {**PARAMS, "count": np.zeros((), jax.dtypes.float0)}


def test_masters_exist_for_halves_only() -> None:
    """float32 parameters and integers have none. Each half-precision parameter gets its
    own master.
    """
    tx = gradaccum.wrap(optax.sgd(2.0**-10), steps=1, master_weights=True)
    state = tx.init(PARAMS)
    assert [leaf.dtype for leaf in jax.tree.leaves(state.masters)] == [jnp.float32] * 2
    assert state.masters["embedding"] is None
    assert state.masters["count"] is None
    updates, state = tx.update(GRADS, state, PARAMS)
    for name in ("w", "head"):
        master = PARAMS[name].astype(jnp.float32) * (1 - 2.0**-10)
        assert_array_equal(state.masters[name], master)
        assert_array_equal(
            optax.apply_updates(PARAMS[name], updates[name]),
            master.astype(PARAMS[name].dtype),
        )
    momentum = gradaccum.wrap(optax.adam(0.1), steps=2, master_weights=True)
    moments = jax.tree.leaves(momentum.init(PARAMS).inner_state)
    assert {str(leaf.dtype) for leaf in moments} == {"int32", "float32"}


SIDE = 1024
MATRICES = 4
ELEMENTS = MATRICES * SIDE * SIDE


@pytest.mark.parametrize("masters", [True, False])
def test_half_precision_step_works_in_place(masters: bool) -> None:
    """Parameters take 2 bytes, sums 4, a moment 2; masters 4, and a moment then 4.
    Scratch is half a gradient.
    """
    tx = gradaccum.wrap(
        optax.sgd(0.1, momentum=0.9), steps=4, master_weights=masters, clip_norm=1.0
    )
    params = {f"w{i}": jnp.ones((SIDE, SIDE), jnp.float16) for i in range(MATRICES)}

    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    compiled = (
        jax.jit(step, donate_argnums=(0, 1))
        .lower(params, jax.eval_shape(tx.init, params), params)
        .compile()
    )
    memory = compiled.memory_analysis()
    expected = (14 if masters else 8) * ELEMENTS
    assert expected <= memory.alias_size_in_bytes
    assert memory.output_size_in_bytes <= expected + 1024
    assert memory.temp_size_in_bytes <= 2 * ELEMENTS + 4096
    assert not re.findall(rf"= \w+\[{SIDE},{SIDE}\]\S* copy\(", compiled.as_text())


def bits(array: Any) -> Any:
    return np.asarray(array).view(np.uint16)


def every_number(name: str) -> Any:
    """All bit patterns but inf, NaN and what XLA may flush."""
    every = np.arange(2**16, dtype=np.uint16).view(HALVES[name])
    with np.errstate(invalid="ignore"):
        size = np.abs(every.astype(np.float32))
    return every[np.isfinite(size) & ((size == 0) | (size >= RANGE[name][0]))]


def masters_between(name: str, count: int) -> Any:
    """Return float32 numbers over the whole range of the dtype and below it; every
    fourth lies exactly between two numbers of the dtype.
    """
    rng = np.random.default_rng(1)
    low, high = np.log2(RANGE[name])
    masters = np.exp2(rng.uniform(low - 2, high - 0.01, count)).astype(np.float32)
    masters *= rng.choice([-1, 1], count)
    mask = np.uint32(0xFFFFF000 if name == "float16" else 0xFFFF8000)
    masters[::4] = (masters[::4].view(np.uint32) & mask).view(np.float32)
    return masters


@by_half
@pytest.mark.parametrize("together", [True, False], ids=["one_program", "two_programs"])
def test_parameters_reach_their_rounded_masters(name: str, together: bool) -> None:
    """All finite parameters, with random masters near and far: bit for bit where the
    docstring of `distance` promises it, and nearly elsewhere.
    """
    held = np.tile(every_number(name), 8)
    p = held.astype(np.float64)

    def move(p, masters):
        update = distance if together else jax.jit(distance)
        return optax.apply_updates(p, update(p, masters))

    for masters in (masters_between(name, held.size), held.astype(np.float32)):
        with np.errstate(over="ignore"):
            rounded_master = masters.astype(HALVES[name])
        moved = np.asarray((jax.jit(move) if together else move)(held, masters))
        q = np.float64(rounded_master)
        found = np.float64(moved)
        promised = (
            (np.abs(p) <= LARGEST_RATIO[name] * np.abs(q))
            | (name == "float16") & (np.abs(q - p) <= 1)
        ) & (np.abs(q - p) < np.finfo(np.float32).max)
        promised &= np.isfinite(q) & (np.abs(q) >= RANGE[name][0])
        assert promised.mean() > 0.4
        assert_array_equal(bits(moved)[promised], bits(rounded_master)[promised])
        assert not found[q == 0].any()
        rest = np.isfinite(q) & np.isfinite(found) & ~promised & (q != 0)
        off = np.abs(found[rest] - q[rest])
        assert np.all(off <= 2.0**-23 * np.abs(p[rest]) + 2.0**-126)


def test_missed_master_is_off_by_its_rounding_error() -> None:
    """No float32 update moves 1024 to -2^-14: `optax.apply_updates` arrives at 0, from
    which the next update continues.

    `gradaccum_jax.apply_updates`, with the state at hand, arrives at the master.
    """
    master = jnp.asarray([1023.76447], jnp.float32)
    params = {"w": master.astype(jnp.float16)}
    tx = gradaccum.wrap(optax.sgd(1.0), steps=1, master_weights=True)
    state = tx.init(params)._replace(masters={"w": master})
    updates, state = tx.update({"w": master + 2.0**-14}, state, params)
    assert state.masters["w"] == -(2.0**-14)
    moved = gradaccum_jax.apply_updates(params, updates, (state,))["w"]
    assert moved == -(2.0**-14)
    assert moved.dtype == jnp.float16
    params = optax.apply_updates(params, updates)
    assert params["w"] == 0
    _, state = tx.update({"w": jnp.zeros(1)}, state, params)
    assert state.masters["w"] == 0


@pytest.mark.parametrize("dtype", [*HALVES, "float8_e5m2"])
def test_changed_parameters_replace_their_masters(dtype: str) -> None:
    """Loaded or projected elements count; the others keep the masters' small bits, also
    if they are off by a rounding error.
    """
    small = 2.0**-14
    params = jnp.ones(3, dtype)
    eps = float(jnp.finfo(dtype).eps)
    tx = gradaccum.wrap(optax.sgd(small), steps=1, master_weights=True)
    state = tx.init(params)
    for changed in (params, jnp.asarray([1, 1 + 2 * eps, 1 + eps], dtype)):
        _, state = tx.update(jnp.ones(3), state, changed)
    kept = 1 - 2 * small
    assert_array_equal(state.masters, [kept, 1 + 2 * eps - small, kept])


@by_half
def test_signs_of_zeros(name: str) -> None:
    p = jnp.asarray([-0.0, -0.0, 0.0, 1e-3, -1e-3], HALVES[name])
    masters = jnp.asarray([-0.0, 0.0, 0.0, 1e-3, -1e-3], jnp.float32)
    moved = optax.apply_updates(p, distance(p, masters))
    assert_array_equal(bits(moved), bits(masters.astype(p.dtype)))
    tiny = jnp.asarray([-(2.0**-26), 2.0**-26], jnp.float32)
    p = jnp.full(2, 2.0**-4, jnp.float16)
    assert bits(optax.apply_updates(p, distance(p, tiny))).tolist() == [2**15, 0]


def test_float8_parameter_has_a_float32_master() -> None:
    """Its gradients are of the float32 parameters with which the loss is computed."""
    params = jnp.ones(2, jnp.float8_e4m3fn)
    tx = gradaccum.wrap(optax.sgd(0.25), steps=1, master_weights=True)
    state = tx.init(params)
    assert state.accumulator.dtype == jnp.float32
    updates, state = tx.update(jnp.ones(2), state, params)
    made = gradaccum_jax.apply_updates(params, updates, state)
    assert made.dtype == params.dtype
    assert_array_equal(made.astype(jnp.float32), 0.75)
