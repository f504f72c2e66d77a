"""The update that moves a half-precision parameter to its rounded float32 master, bit for bit, for every number of the dtype."""

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
from gradaccum_jax.parameters import distance, rounded

HALVES = {"float16": jnp.float16, "bfloat16": jnp.bfloat16}
LARGEST_RATIO = {"float16": 4092, "bfloat16": 32764}
BITS = {"float16": (2.0**-24, 65504.0), "bfloat16": (2.0**-110, 2.0**127)}
by_half = pytest.mark.parametrize("name", HALVES)


def bits(array: Any) -> Any:
    return np.asarray(array).view(np.uint16)


def every_number(name: str) -> Any:
    """Return all 65536 bit patterns but inf and NaN. Of bfloat16 the smallest are left out: XLA may flush their differences to 0."""
    every = np.arange(2**16, dtype=np.uint16).view(HALVES[name])
    with np.errstate(invalid="ignore"):
        size = np.abs(every.astype(np.float32))
    return every[np.isfinite(size) & ((size == 0) | (size >= BITS[name][0]))]


def random_masters(name: str, count: int, seed: int) -> Any:
    """Return float32 numbers over the whole range of the dtype and below it. A quarter lies exactly between two numbers of the dtype."""
    rng = np.random.default_rng(seed)
    low, high = np.log2(BITS[name])
    values = rng.choice([-1.0, 1.0], count) * 2.0 ** rng.uniform(low - 2 * (name == "float16"), high - 0.01, count)
    between = values.astype(np.float32).view(np.uint32) & np.uint32(0xFFFFF000 if name == "float16" else 0xFFFF8000)
    return np.where(rng.random(count) < 0.25, between.view(np.float32), values.astype(np.float32))


def allowed(name: str, p: Any, q: Any) -> Any:
    """Return where the docstring of `distance` promises the rounded master bit for bit, except the signs of zeros."""
    p, q = np.asarray(p, np.float64), np.asarray(q, np.float64)
    near = (name == "float16") & (np.abs(q - p) <= 1)
    reachable = np.abs(q - p) < np.finfo(np.float32).max
    return reachable & ((np.abs(p) <= LARGEST_RATIO[name] * np.abs(q)) | near | (q == 0))


@by_half
def test_rounding_matches_the_dtype(name: str) -> None:
    masters = np.concatenate([random_masters(name, 200_000, 0), every_number(name).astype(np.float32), np.float32([65519.9, 1e-40])])
    with np.errstate(over="ignore"):
        expected = masters.astype(HALVES[name]).astype(np.float32)
    kept = (np.abs(masters) >= 2.0**-126) | (masters == 0)
    got = np.asarray(jax.jit(lambda m: rounded(m, HALVES[name]))(masters))
    np.testing.assert_array_equal(got[kept].view(np.uint32), expected[kept].view(np.uint32))


@by_half
@pytest.mark.parametrize("together", [True, False], ids=["one_program", "two_programs"])
def test_parameters_reach_their_rounded_masters(name: str, together: bool) -> None:
    """All finite parameters, with random masters near and far."""
    held = np.tile(every_number(name), 8)
    far = random_masters(name, held.size, 1)
    factors = np.random.default_rng(2).uniform(-4, 4, held.size)
    near = np.clip(held.astype(np.float64) * factors, -(2.0**127), 2.0**127).astype(np.float32)
    update = distance if together else jax.jit(distance)
    move = jax.jit(lambda p, m: optax.apply_updates(p, update(p, m))) if together else lambda p, m: optax.apply_updates(p, update(p, m))
    for masters in (far, near, held.astype(np.float32)):
        with np.errstate(over="ignore"):
            q = masters.astype(HALVES[name])
        moved = np.asarray(move(jnp.asarray(held), jnp.asarray(masters)))
        promised = allowed(name, held, q) & np.isfinite(q.astype(np.float32)) & (np.abs(q.astype(np.float32)) >= BITS[name][0])
        assert promised.mean() > 0.4
        np.testing.assert_array_equal(bits(moved)[promised], bits(q)[promised])
        zero = q == 0
        np.testing.assert_array_equal(moved[zero].astype(np.float32), 0.0)
        rest = np.isfinite(q.astype(np.float32)) & np.isfinite(moved.astype(np.float32)) & ~promised & ~zero
        off = np.abs(moved[rest].astype(np.float64) - q[rest].astype(np.float64))
        assert np.all(off <= 2.0**-23 * np.abs(held[rest].astype(np.float64)) + 2.0**-126)


@by_half
def test_next_update_reaches_a_missed_master(name: str) -> None:
    """No float32 update moves 1000 to 2^-20: `optax.apply_updates` arrives at 0, and the next update moves on to the master.

    `gradaccum_jax.apply_updates`, with the state at hand, arrives at once.
    """
    params = {"w": jnp.asarray([1000.0], HALVES[name])}
    tiny = 2.0**-20 if name == "float16" else 2.0**-40
    tx = gradaccum.wrap(optax.sgd(0.0), steps=1, master_weights=True)
    state = tx.init(params)._replace(masters={"w": jnp.asarray([tiny])})
    updates, state = tx.update(params, state, params)
    assert optax.apply_updates(params, updates)["w"] == 0
    assert gradaccum_jax.apply_updates(params, updates, (state,))["w"] == tiny
    assert gradaccum_jax.apply_updates(params, updates, state)["w"].dtype == HALVES[name]
    params = optax.apply_updates(params, updates)
    updates, state = tx.update(params, state, params)
    assert optax.apply_updates(params, updates)["w"] == tiny


@by_half
def test_signs_of_zeros(name: str) -> None:
    p = jnp.asarray([-0.0, -0.0, 0.0, 1e-3, -1e-3], HALVES[name])
    masters = jnp.asarray([-0.0, 0.0, 0.0, 1e-3, -1e-3], jnp.float32)
    np.testing.assert_array_equal(bits(optax.apply_updates(p, distance(p, masters))), bits(masters.astype(p.dtype)))


def test_tiny_master_rounds_to_signed_zero() -> None:
    p, tiny = jnp.asarray([2.0**-4, 2.0**-4], jnp.float16), jnp.asarray([-(2.0**-26), 2.0**-26], jnp.float32)
    moved = optax.apply_updates(p, distance(p, tiny))
    np.testing.assert_array_equal(moved, [0.0, 0.0])
    np.testing.assert_array_equal(np.signbit(moved), [True, False])


def test_mid_window_updates_change_no_bit() -> None:
    tx = gradaccum.wrap(optax.sgd(1.0), steps=3, master_weights=True)
    every = {name: jnp.asarray(np.arange(2**16, dtype=np.uint16).view(dtype)) for name, dtype in HALVES.items()}
    grads = jax.tree.map(jnp.ones_like, every)
    updates, _ = tx.update(grads, tx.init(every), every)
    moved = optax.apply_updates(every, updates)
    for name in HALVES:
        with np.errstate(invalid="ignore"):
            size = np.abs(np.asarray(every[name]).astype(np.float32))
        kept = (size == 0) | (size >= BITS[name][0])
        np.testing.assert_array_equal(bits(moved[name])[kept], bits(every[name])[kept])
    without_end = gradaccum.wrap(optax.sgd(1.0), steps=None, master_weights=True)
    updates, _ = without_end.update(grads, without_end.init(every), every)
    assert {leaf.dtype for leaf in jax.tree.leaves(updates)} == {jnp.dtype("float32")}
    assert all(np.all(np.signbit(leaf)) and not np.any(leaf) for leaf in jax.tree.leaves(updates))
