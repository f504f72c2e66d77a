"""Checkpoints in mid-window, by JAX, flax and orbax: a resumed run keeps every bit, and
a foreign state is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradaccum
import gradaccum_jax

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
    grads = jax.grad(
        lambda p: gradaccum_jax.scale_loss(
            sum(jnp.sum((leaf - number) ** 2) for leaf in jax.tree.leaves(p)), state
        )
    )(params)
    updates, state = TX.update(grads, state, params, weight=number + 1)
    return optax.apply_updates(params, updates), state


def train(params: Any, state: Any, numbers: range) -> Any:
    for number in numbers:
        params, state = step(params, state, float(number))
    return params, state


def assert_bitwise(a: Any, b: Any) -> None:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for left, right in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert left.dtype == right.dtype
        assert np.asarray(left).tobytes() == np.asarray(right).tobytes()


def through_flax_bytes(tree: Any, like: Any, directory: Path) -> Any:
    serialization = pytest.importorskip(
        "flax.serialization", reason="flax is not installed"
    )
    return serialization.from_bytes(like, serialization.to_bytes(tree))


def through_flax_without_target(tree: Any, like: Any, directory: Path) -> Any:
    serialization = pytest.importorskip(
        "flax.serialization", reason="flax is not installed"
    )
    params, state = serialization.msgpack_restore(
        serialization.to_bytes({"p": tree[0], "s": tree[1]})
    ).values()
    return params, gradaccum_jax.check_state(TX, state, PARAMS)


def through_orbax_pytree(tree: Any, like: Any, directory: Path) -> Any:
    orbax = pytest.importorskip("orbax.checkpoint", reason="orbax is not installed")
    with orbax.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(directory / "checkpoint", {"p": tree[0], "s": tree[1]})
        restored = checkpointer.restore(directory / "checkpoint")
    return restored["p"], gradaccum_jax.check_state(TX, restored["s"], PARAMS)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize(
    "through", [through_flax_bytes, through_flax_without_target, through_orbax_pytree]
)
def test_resume_in_mid_window_is_bitwise(
    through: Callable[..., Any], tmp_path: Path
) -> None:
    """A run that is saved and restored within a window ends on the bits of the
    uninterrupted one.
    """
    start = (PARAMS, TX.init(PARAMS))
    half = train(*start, range(5))
    assert half[1].micro_step == 2
    assert all(np.any(leaf) for leaf in jax.tree.leaves(half[1].accumulator))
    params, state = through(half, start, tmp_path)
    state = gradaccum_jax.check_state(TX, state, PARAMS)
    assert_bitwise((params, state), half)
    assert_bitwise(train(params, state, range(5, 8)), train(*start, range(8)))


def other_shape(state: Any) -> Any:
    return state._replace(accumulator={**state.accumulator, "b": jnp.zeros(3)})


def other_dtype(state: Any) -> Any:
    return state._replace(
        accumulator={**state.accumulator, "b": jnp.zeros(2, jnp.float16)}
    )


def other_name(state: Any) -> Any:
    return state._replace(
        accumulator={"layer": state.accumulator["layer"], "c": jnp.zeros(2)}
    )


def one_more(state: Any) -> Any:
    return {**state._asdict(), "colour": jnp.zeros(2)}


def without(name: str) -> Callable[[Any], Any]:
    return lambda state: {
        key: value for key, value in state._asdict().items() if key != name
    }


@pytest.mark.parametrize(
    "spoil",
    [
        other_shape,
        other_dtype,
        other_name,
        one_more,
        *(
            without(name)
            for name in gradaccum_jax.AccumulationState._fields
            if name != "masters"
        ),  # none here
        lambda state: state._replace(micro_step=jnp.asarray(4, jnp.int32)),
        lambda state: state._replace(micro_step=jnp.asarray(-1, jnp.int32)),
        lambda state: state._replace(
            micro_step=jnp.asarray(1, jnp.int32),
            terms=jnp.asarray([1, 7, 0, 0, 0], jnp.int32),
        ),
        lambda state: state._replace(terms=state.terms.at[0].add(1)),  # the format
        lambda state: (),
    ],
)
def test_foreign_state_is_refused(spoil: Callable[[Any], Any]) -> None:
    state = TX.init(PARAMS)
    gradaccum_jax.check_state(TX, state._asdict(), PARAMS)
    with pytest.raises(
        gradaccum.CheckpointError, match=r"^(state|micro_step|terms|format)"
    ):
        gradaccum_jax.check_state(TX, spoil(state), PARAMS)


def test_schedule_is_read_at_saved_step() -> None:
    """Windows of one, five of them, then windows of four: only in the sixth can three
    micro-batches be open.
    """
    for steps in ([(0, 1), (5, 4)], lambda step: jnp.where(step < 5, 1, 4)):
        tx = make_tx(steps=steps)
        update, state = jax.jit(tx.update), tx.init(PARAMS)
        for _ in range(8):
            _, state = update(PARAMS, state, PARAMS)
        assert_bitwise(gradaccum_jax.check_state(tx, state, PARAMS), state)
        with pytest.raises(
            gradaccum.CheckpointError,
            match=r"steps=1; got one that was saved under steps=4",
        ):
            gradaccum_jax.check_state(
                tx, state._replace(optimizer_step=jnp.asarray(4, jnp.int32)), PARAMS
            )


def test_callable_steps_gets_an_array() -> None:
    tx = make_tx(steps=lambda step: (2 + step).astype(jnp.int32))
    _, state = tx.update(PARAMS, tx.init(PARAMS), PARAMS)
    assert_bitwise(gradaccum_jax.check_state(tx, state, PARAMS), state)


def test_restored_state_has_memory_of_its_own() -> None:
    saved = jax.tree.map(
        lambda leaf: np.full(np.shape(leaf), leaf),
        train(PARAMS, TX.init(PARAMS), range(5))[1],
    )
    aligned = jax.tree.map(lambda leaf: leaf.copy(), saved)
    state = gradaccum_jax.check_state(TX, saved, PARAMS)
    for leaf in jax.tree.leaves(saved):
        leaf[...] = 0
    assert_bitwise(state, aligned)
