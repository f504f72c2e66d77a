"""Convert the state of a shared window to a different number of devices.

Outside `jax.shard_map`, the fields of the state whose values differ between devices
have a leading axis with one entry per device. So a checkpoint always contains the
gradient sums of all devices.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from gradaccum_jax.arrays import Array, Tree, is_key
from gradaccum_jax.state import AccumulationState, as_read, as_stored, is_state
from gradaccum_jax.workers.group import by_kind


def redistributed(state: Tree, workers: int) -> Tree:
    """Convert `state`, for example from a checkpoint, to a different number of devices.
    No micro-batch of an open window is lost.

    The first device gets the totals of the gradient sums and of the weights, and the
    other devices get zeros. If the number of devices does not change, the state does
    not change either. Do not call this function under `jax.jit`, because it reads the
    values of arrays.

    Args:
        state: the state of a wrapped optimizer with ``axis_name``, or a tree that
            contains such a state, as `data_parallel` returned it.
        workers: the number of devices, >= 1, that will share the window.
    """
    return jax.tree.map(
        lambda node: _on_devices(node, workers) if is_state(node) else node,
        state,
        is_leaf=is_state,
    )


def _on_devices(state: AccumulationState, workers: int) -> AccumulationState:
    if len(state.weight) == workers:
        return state

    def on_first_device(leaf: Array) -> Array:
        rows = jnp.zeros((workers, *leaf.shape[1:]), leaf.dtype)
        return rows.at[0].set(leaf.sum(0, dtype=leaf.dtype))

    # The arrays are copied to the host first, so that a state saved on one mesh can be
    # placed on another mesh.
    state = jax.tree.map(
        lambda leaf: leaf if is_key(leaf) else jnp.asarray(jax.device_get(leaf)), state
    )
    state = state._replace(loss=as_read(state.loss))
    state = by_kind(state, own=on_first_device)
    return state._replace(loss=as_stored(state.loss))
