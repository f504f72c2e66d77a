"""orbax saves a flax TrainState in mid-window; the resumed run has the bits of the
uninterrupted one.

What each checkpointer of orbax makes of the bare state is in the framework's tests of
checkpoints.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("optax", reason="optax is not installed")
import jax
import jax.numpy as jnp
import numpy as np
import optax

import gradaccum
import gradaccum_jax

from .jax_epoch import assert_bitwise

orbax = pytest.importorskip("orbax.checkpoint", reason="orbax is not installed")
train_state = pytest.importorskip(
    "flax.training.train_state", reason="flax is not installed"
)

# orbax's own, of its other formats
pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::UserWarning"
)
PARAMS = {
    "w": jnp.asarray([[1.0, -2.0], [0.5, 4.0]]),
    "b": jnp.asarray([0.25, 3.0], jnp.bfloat16),
}
TX = gradaccum.wrap(
    optax.adamw(0.1),
    steps=4,
    loss_scale=gradaccum.DynamicLossScale(init_scale=8.0),
    master_weights=True,
)


def created() -> Any:
    return train_state.TrainState.create(apply_fn=None, params=PARAMS, tx=TX)


@jax.jit
def step(state: Any, number: Any) -> Any:
    def loss(params: Any) -> Any:
        total = sum(
            jnp.sum((leaf.astype(jnp.float32) - number) ** 2)
            for leaf in jax.tree.leaves(params)
        )
        return gradaccum_jax.scale_loss(total, state.opt_state)

    return state.apply_gradients(grads=jax.grad(loss)(state.params))


def train(state: Any, numbers: range) -> Any:
    for number in numbers:
        state = step(state, float(number))
    return state


def assert_resumes(restored: Any) -> None:
    held = gradaccum_jax.check_state(TX, restored.opt_state, restored.params)
    assert held.micro_step == 2
    assert_bitwise(
        train(restored.replace(opt_state=held), range(6, 11)),
        train(created(), range(11)),
    )


def test_train_state_by_the_standard_checkpointer(tmp_path: Path) -> None:
    with orbax.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", train(created(), range(6)))
        checkpointer.wait_until_finished()
        assert_resumes(checkpointer.restore(tmp_path / "state", created()))


def test_train_state_by_the_manager(tmp_path: Path) -> None:
    """It keeps the last two of four, all of them in mid-window, and restores the last
    into abstract arrays.
    """
    state = created()
    with orbax.CheckpointManager(
        tmp_path, options=orbax.CheckpointManagerOptions(max_to_keep=2)
    ) as manager:
        for number in (1, 2, 3, 6):
            state = train(state, range(int(state.step), number))
            manager.save(number, args=orbax.args.StandardSave(state))
        manager.wait_until_finished()
        assert manager.all_steps() == [3, 6]
        single = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        shapes = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(
                np.shape(leaf), jnp.result_type(leaf), sharding=single
            ),
            created(),
        )
        assert_resumes(manager.restore(6, args=orbax.args.StandardRestore(shapes)))


def test_state_of_another_window_is_refused(tmp_path: Path) -> None:
    """It is restored without a word; `check_state` names the option."""
    with orbax.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", train(created(), range(6)))
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "state", created())
    scale = gradaccum.DynamicLossScale(init_scale=8.0)
    other = gradaccum.wrap(
        optax.adamw(0.1), steps=8, loss_scale=scale, master_weights=True
    )
    with pytest.raises(gradaccum.CheckpointError, match=r"^steps"):
        gradaccum_jax.check_state(other, restored.opt_state, restored.params)
