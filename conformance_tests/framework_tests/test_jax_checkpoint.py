"""Checkpoints in mid-window: a resumed run keeps every bit, and a foreign state is
refused.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradaccum
import gradaccum_jax

from .jax_comparison import assert_bitwise

PARAMS = {
    "layer": {"w": jnp.asarray([[1.0, -2.0], [0.5, 4.0]])},
    "b": jnp.asarray([0.25, 3.0]),
}


def make_tx(**options: Any) -> Any:
    scale = gradaccum.DynamicLossScale(init_scale=4.0, growth_interval=1)
    return gradaccum.wrap(
        optax.adamw(0.1), **{"steps": 3, "loss_scale": scale, **options}
    )


TX = make_tx()


@jax.jit
def step(params: Any, state: Any, number: Any) -> Any:
    grads = jax.tree.map(lambda leaf: (leaf - number) * state.loss_scale, params)
    updates, state = TX.update(grads, state, params, weight=number + 1, value=number)
    return optax.apply_updates(params, updates), state


def train(params: Any, state: Any, numbers: range) -> Any:
    for number in numbers:
        params, state = step(params, state, float(number))
    return params, state


def test_resume_through_flax_is_bitwise() -> None:
    """In mid-window; without a target flax returns nested dicts."""
    serialization = pytest.importorskip(
        "flax.serialization", reason="flax is not installed"
    )
    start = (PARAMS, TX.init(PARAMS))
    half = train(*start, range(5))
    assert half[1].micro_step == 2
    assert all(np.any(leaf) for leaf in jax.tree.leaves(half[1].accumulator))
    state = serialization.msgpack_restore(serialization.to_bytes(half[1]))
    state = gradaccum_jax.check_state(TX, state, PARAMS)
    assert_bitwise(state, half[1])
    assert_bitwise(train(half[0], state, range(5, 8)), train(*start, range(8)))


SPOILT: dict[str, Any] = {
    "other dtype": lambda state: state._replace(
        accumulator={**state.accumulator, "b": jnp.zeros(2, jnp.float16)}
    ),
    "one more": lambda state: {**state._asdict(), "colour": jnp.zeros(2)},
    "no sum": lambda state: state._replace(accumulator=()),
}


@pytest.mark.parametrize("name", SPOILT)
def test_foreign_state_is_refused(name: str) -> None:
    with pytest.raises(gradaccum.CheckpointError, match=r"^state\."):
        gradaccum_jax.check_state(TX, SPOILT[name](TX.init(PARAMS)), PARAMS)


def test_schedule_is_read_at_the_saved_step() -> None:
    """Windows of one, five of them, then windows of four: only in the sixth can three
    micro-batches be open.
    """
    tx = make_tx(steps=lambda step: jnp.where(step < 5, 1, 4).astype(jnp.int32))
    update = jax.jit(tx.update)
    state = tx.init(PARAMS)
    for _ in range(8):
        _, state = update(PARAMS, state, PARAMS)
    assert_bitwise(gradaccum_jax.check_state(tx, state, PARAMS), state)
    earlier = state._replace(optimizer_step=jnp.asarray(4, jnp.int32))
    with pytest.raises(
        gradaccum.CheckpointError,
        match=r"steps=1; got a window that was saved with steps=4",
    ):
        gradaccum_jax.check_state(tx, earlier, PARAMS)


def test_restored_state_has_memory_of_its_own() -> None:
    saved = jax.tree.map(np.array, train(PARAMS, TX.init(PARAMS), range(5))[1])
    aligned = jax.tree.map(np.copy, saved)
    state = gradaccum_jax.check_state(TX, saved, PARAMS)
    for leaf in jax.tree.leaves(saved):
        leaf[...] = 0
    assert_bitwise(state, aligned)
