"""float32 masters: they train as float32 parameters do, wrong arguments are refused,
and a compiled step holds no further copy.
"""

from __future__ import annotations

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradaccum
import gradaccum_jax
from gradaccum_jax.master_weights import distance, in_place_of, rounded

HALVES = {"float16": jnp.float16, "bfloat16": jnp.bfloat16}


by_half = pytest.mark.parametrize("name", HALVES)


SIDE, MATRICES = 1024, 4


ELEMENTS = MATRICES * SIDE * SIDE


PARAMS = {
    "embedding": jnp.asarray([[1.0, -2.0]]),
    "layer": {
        "w": jnp.asarray([1.0, -0.0, 3.0], jnp.bfloat16),
        "frozen": None,
        "count": jnp.asarray(3),
    },
    "head": jnp.asarray([0.5], jnp.float16),
}


GRADS = {
    "embedding": jnp.asarray([[0.5, 1.0]]),
    "layer": {
        "w": jnp.asarray([1.0, 2.0, -1.0], jnp.bfloat16),
        "frozen": None,
        "count": np.zeros((), jax.dtypes.float0),
    },
    "head": jnp.asarray([0.25], jnp.float16),
}


def wrap(inner: Any, **options: Any) -> Any:
    return gradaccum.wrap(inner, **{"steps": 2, "master_weights": True, **options})


def through_scan(params: Any, state: Any, tx: Any, count: int) -> Any:
    def body(carry: Any, _: Any) -> Any:
        updates, state = tx.update(GRADS, carry[1], carry[0])
        return (optax.apply_updates(carry[0], updates), state), None

    return jax.lax.scan(body, (params, state), length=count)[0]


def through_vmap(params: Any, state: Any, tx: Any, count: int) -> Any:
    batched = jax.tree.map(
        lambda leaf: jnp.broadcast_to(leaf, (3, *jnp.shape(leaf))), (params, state)
    )
    return jax.tree.map(
        lambda leaf: leaf[1],
        jax.vmap(lambda params, state: through_scan(params, state, tx, count))(
            *batched
        ),
    )


@functools.cache
def float32_training() -> Any:
    """Return the parameters and the state after 21 micro-batches with float32
    parameters and no masters.
    """
    params, grads = jax.tree.map(
        lambda leaf: leaf.astype(jnp.float32) if leaf.dtype.itemsize == 2 else leaf,
        (PARAMS, GRADS),
    )
    bare = gradaccum.wrap(optax.adamw(1e-3), steps=2)
    return through_scan(params, bare.init(params), given(bare, grads), 21)


@pytest.mark.parametrize("run", [through_scan, through_vmap])
def test_mixed_dtypes_train_as_float32(run: Any) -> None:
    """The masters go the way of float32 parameters, and each parameter is its rounded
    master.
    """
    tx = wrap(optax.adamw(1e-3))
    params, state = run(PARAMS, tx.init(PARAMS), tx, 21)
    held, other = float32_training()
    assert state.optimizer_step == other.optimizer_step == 10
    masters = in_place_of(params, state.masters)
    for got, master, wide in zip(
        *map(jax.tree.leaves, (params, masters, held)), strict=True
    ):
        assert (
            np.asarray(got).tobytes() == np.asarray(master.astype(got.dtype)).tobytes()
        )
        # XLA fuses the two programs differently.
        np.testing.assert_allclose(master, wide, rtol=1e-5)
    for got, expected in zip(
        jax.tree.leaves(state.inner_state),
        jax.tree.leaves(other.inner_state),
        strict=True,
    ):
        assert got.dtype == expected.dtype
        np.testing.assert_allclose(got, expected, rtol=1e-5)


def given(tx: Any, grads: Any) -> Any:
    """Return `tx` as a transformation that takes `grads` in place of every gradient."""
    return optax.GradientTransformationExtraArgs(
        tx.init, lambda _, state, params: tx.update(grads, state, params)
    )


def test_masters_exist_for_halves_only() -> None:
    """float32 parameters and integers have none."""
    state = wrap(optax.adam(0.1)).init(PARAMS)
    assert [leaf.dtype for leaf in jax.tree.leaves(state.masters)] == [jnp.float32] * 2
    assert state.masters["embedding"] is None
    assert state.masters["layer"]["count"] is None
    assert {leaf.dtype for leaf in jax.tree.leaves(state.inner_state)} == {
        jnp.dtype("int32"),
        jnp.dtype("float32"),
    }
    assert (
        jax.tree.leaves(gradaccum.wrap(optax.adam(0.1), steps=2).init(PARAMS).masters)
        == []
    )


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
    calls = {
        "update": lambda p: tx.update(GRADS, state, p),
        "flush": lambda p: gradaccum_jax.flush(tx, state, p),
    }
    with pytest.raises(
        gradaccum.ArgumentTypeError, match=r"params: expected .*master_weights=True"
    ):
        calls[close](None)
    with pytest.raises(
        gradaccum.ArgumentValueError,
        match="params: expected half-precision parameters of these shapes",
    ):
        calls[close](jax.tree.map(lambda leaf: leaf.astype(jnp.float32), PARAMS))


def compiled_step(tx: Any, params: Any) -> Any:
    def step(params: Any, state: Any, grads: Any) -> Any:
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return (
        jax.jit(step, donate_argnums=(0, 1))
        .lower(params, jax.eval_shape(tx.init, params), params)
        .compile()
    )


def copies(compiled: Any) -> int:
    return len(re.findall(rf"= \w+\[{SIDE},{SIDE}\]\S* copy\(", compiled.as_text()))


@by_half
@pytest.mark.parametrize(
    "options",
    [{}, {"clip_norm": 1.0, "on_overflow": "drop_micro_batch", "loss_scale": 8}],
    ids=["plain", "options"],
)
def test_wrapping_adds_only_the_sum(name: str, options: dict[str, Any]) -> None:
    """With everything donated: one float32 sum in place, and no scratch or copy beyond
    those of the bare half-precision optimizer.
    """
    inner = optax.sgd(0.1, momentum=0.9)
    params = {f"w{i}": jnp.ones((SIDE, SIDE), HALVES[name]) for i in range(MATRICES)}
    bare, wrapped = (
        compiled_step(inner, params),
        compiled_step(gradaccum.wrap(inner, steps=4, **options), params),
    )
    before, after = bare.memory_analysis(), wrapped.memory_analysis()
    assert after.alias_size_in_bytes >= before.alias_size_in_bytes + 4 * ELEMENTS
    assert (
        after.output_size_in_bytes <= before.output_size_in_bytes + 4 * ELEMENTS + 1024
    )
    # XLA before JAX 0.10 copies each bfloat16 array once more on a CPU, one after the
    # other.
    copied = name == "bfloat16" and jax.__version_info__ < (0, 10)
    assert (
        after.temp_size_in_bytes
        <= before.temp_size_in_bytes + 2 * ELEMENTS + (2 * SIDE**2 + 1024) * copied
    )
    assert copies(wrapped) <= copies(bare) + MATRICES * copied


@by_half
@pytest.mark.parametrize(
    ("inner", "scratch"),
    [(optax.sgd(0.1, momentum=0.9), 0.5), (optax.adamw(1e-3), 1.0)],
    ids=["momentum", "adamw"],
)
def test_masters_add_no_further_copy(name: str, inner: Any, scratch: float) -> None:
    """Parameters take 2 bytes, sums 4, masters 4, moments 4 each, all in place. Scratch
    is the mean gradient, if `inner` reads it twice.
    """
    params = {f"w{i}": jnp.ones((SIDE, SIDE), HALVES[name]) for i in range(MATRICES)}
    compiled = compiled_step(wrap(inner, steps=4), params)
    moments = (
        sum(
            leaf.ndim == 2
            for leaf in jax.tree.leaves(jax.eval_shape(inner.init, params))
        )
        // MATRICES
    )
    expected = (2 + 4 + 4 + 4 * moments) * ELEMENTS
    memory = compiled.memory_analysis()
    assert (
        expected
        <= memory.alias_size_in_bytes
        <= memory.output_size_in_bytes
        <= expected + 1024
    )
    assert memory.temp_size_in_bytes <= scratch * 4 * ELEMENTS + 4096
    assert copies(compiled) == 0


LARGEST_RATIO = {"float16": 4092, "bfloat16": 32764}


BITS = {"float16": (2.0**-24, 65504.0), "bfloat16": (2.0**-110, 2.0**127)}


def bits(array: Any) -> Any:
    return np.asarray(array).view(np.uint16)


def every_number(name: str) -> Any:
    """Return all 65536 bit patterns but inf and NaN. Of bfloat16 the smallest are left
    out: XLA may flush their differences to 0.
    """
    every = np.arange(2**16, dtype=np.uint16).view(HALVES[name])
    with np.errstate(invalid="ignore"):
        size = np.abs(every.astype(np.float32))
    return every[np.isfinite(size) & ((size == 0) | (size >= BITS[name][0]))]


def random_masters(name: str, count: int, seed: int) -> Any:
    """Return float32 numbers over the whole range of the dtype and below it. A quarter
    lies exactly between two numbers of the dtype.
    """
    rng = np.random.default_rng(seed)
    low, high = np.log2(BITS[name])
    values = rng.choice([-1.0, 1.0], count) * 2.0 ** rng.uniform(
        low - 2 * (name == "float16"), high - 0.01, count
    )
    between = values.astype(np.float32).view(np.uint32) & np.uint32(
        0xFFFFF000 if name == "float16" else 0xFFFF8000
    )
    return np.where(
        rng.random(count) < 0.25, between.view(np.float32), values.astype(np.float32)
    )


def allowed(name: str, p: Any, q: Any) -> Any:
    """Return where the docstring of `distance` promises the rounded master bit for bit,
    except the signs of zeros.
    """
    p, q = np.asarray(p, np.float64), np.asarray(q, np.float64)
    near = (name == "float16") & (np.abs(q - p) <= 1)
    reachable = np.abs(q - p) < np.finfo(np.float32).max
    return reachable & (
        (np.abs(p) <= LARGEST_RATIO[name] * np.abs(q)) | near | (q == 0)
    )


@by_half
def test_rounding_matches_the_dtype(name: str) -> None:
    masters = np.concatenate(
        [
            random_masters(name, 200_000, 0),
            every_number(name).astype(np.float32),
            np.float32([65519.9, 1e-40]),
        ]
    )
    with np.errstate(over="ignore"):
        expected = masters.astype(HALVES[name]).astype(np.float32)
    kept = (np.abs(masters) >= 2.0**-126) | (masters == 0)
    got = np.asarray(jax.jit(lambda m: rounded(m, HALVES[name]))(masters))
    np.testing.assert_array_equal(
        got[kept].view(np.uint32), expected[kept].view(np.uint32)
    )


@by_half
@pytest.mark.parametrize("together", [True, False], ids=["one_program", "two_programs"])
def test_parameters_reach_their_rounded_masters(name: str, together: bool) -> None:
    """All finite parameters, with random masters near and far."""
    held = np.tile(every_number(name), 8)
    far = random_masters(name, held.size, 1)
    factors = np.random.default_rng(2).uniform(-4, 4, held.size)
    near = np.clip(held.astype(np.float64) * factors, -(2.0**127), 2.0**127).astype(
        np.float32
    )
    update = distance if together else jax.jit(distance)
    move = (
        jax.jit(lambda p, m: optax.apply_updates(p, update(p, m)))
        if together
        else lambda p, m: optax.apply_updates(p, update(p, m))
    )
    for masters in (far, near, held.astype(np.float32)):
        with np.errstate(over="ignore"):
            q = masters.astype(HALVES[name])
        moved = np.asarray(move(jnp.asarray(held), jnp.asarray(masters)))
        promised = (
            allowed(name, held, q)
            & np.isfinite(q.astype(np.float32))
            & (np.abs(q.astype(np.float32)) >= BITS[name][0])
        )
        assert promised.mean() > 0.4
        np.testing.assert_array_equal(bits(moved)[promised], bits(q)[promised])
        zero = q == 0
        np.testing.assert_array_equal(moved[zero].astype(np.float32), 0.0)
        rest = (
            np.isfinite(q.astype(np.float32))
            & np.isfinite(moved.astype(np.float32))
            & ~promised
            & ~zero
        )
        off = np.abs(moved[rest].astype(np.float64) - q[rest].astype(np.float64))
        assert np.all(
            off <= 2.0**-23 * np.abs(held[rest].astype(np.float64)) + 2.0**-126
        )


@by_half
def test_next_update_reaches_a_missed_master(name: str) -> None:
    """No float32 update moves 1000 to 2^-20: `optax.apply_updates` arrives at 0, and
    the next update moves on to the master.

    `gradaccum_jax.apply_updates`, with the state at hand, arrives at once.
    """
    params = {"w": jnp.asarray([1000.0], HALVES[name])}
    tiny = 2.0**-20 if name == "float16" else 2.0**-40
    tx = gradaccum.wrap(optax.sgd(0.0), steps=1, master_weights=True)
    state = tx.init(params)._replace(masters={"w": jnp.asarray([tiny])})
    updates, state = tx.update(params, state, params)
    assert optax.apply_updates(params, updates)["w"] == 0
    assert gradaccum_jax.apply_updates(params, updates, (state,))["w"] == tiny
    assert (
        gradaccum_jax.apply_updates(params, updates, state)["w"].dtype == HALVES[name]
    )
    params = optax.apply_updates(params, updates)
    updates, state = tx.update(params, state, params)
    assert optax.apply_updates(params, updates)["w"] == tiny


@by_half
def test_signs_of_zeros(name: str) -> None:
    p = jnp.asarray([-0.0, -0.0, 0.0, 1e-3, -1e-3], HALVES[name])
    masters = jnp.asarray([-0.0, 0.0, 0.0, 1e-3, -1e-3], jnp.float32)
    np.testing.assert_array_equal(
        bits(optax.apply_updates(p, distance(p, masters))),
        bits(masters.astype(p.dtype)),
    )


def test_tiny_master_rounds_to_signed_zero() -> None:
    p, tiny = (
        jnp.asarray([2.0**-4, 2.0**-4], jnp.float16),
        jnp.asarray([-(2.0**-26), 2.0**-26], jnp.float32),
    )
    moved = optax.apply_updates(p, distance(p, tiny))
    np.testing.assert_array_equal(moved, [0.0, 0.0])
    np.testing.assert_array_equal(np.signbit(moved), [True, False])


def test_mid_window_updates_change_no_bit() -> None:
    tx = gradaccum.wrap(optax.sgd(1.0), steps=3, master_weights=True)
    every = {
        name: jnp.asarray(np.arange(2**16, dtype=np.uint16).view(dtype))
        for name, dtype in HALVES.items()
    }
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
    assert all(
        np.all(np.signbit(leaf)) and not np.any(leaf)
        for leaf in jax.tree.leaves(updates)
    )
