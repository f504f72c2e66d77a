"""A window's state outside of `jax.shard_map`: each device's own fields have a leading
axis, one entry for each device.

So any checkpoint holds the buffers of all devices.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from gradaccum_jax.arrays import Array, Tree, is_key
from gradaccum_jax.state import (
    AccumulationState,
    as_read,
    as_stored,
    is_state,
)
from gradaccum_jax.workers.group import by_kind


def redistributed(state: Tree, workers: int) -> Tree:
    """Return `state` for another number of devices, for example of a checkpoint: an
    open window resumes with all that it holds.

    The first device gets the sum of the sums and all of the weight, the others nothing.
    With as many devices as before nothing changes. Not for use under `jit`: it looks at
    values.

    Args:
        state: the state of a wrapped optimizer with ``axis_name``, or a tree that holds
            one, as `data_parallel` returned it.
        workers: the number of devices that share the window from now on, >= 1.
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

    # From the host, so that what is saved on one mesh can go to another.
    state = jax.tree.map(
        lambda leaf: leaf if is_key(leaf) else jnp.asarray(jax.device_get(leaf)), state
    )
    state = state._replace(loss=as_read(state.loss))
    state = by_kind(state, own=on_first_device, shared=lambda leaf: leaf)
    return state._replace(loss=as_stored(state.loss))
