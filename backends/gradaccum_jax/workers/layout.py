"""A window's state outside of `jax.shard_map`: each device's own fields have a leading
axis, one entry for each device.

So any checkpoint holds the buffers of all devices.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from gradaccum import (
    ArgumentTypeError,
    ArgumentValueError,
    GradAccumError,
    UsageError,
)
from gradaccum.kit import State, explain
from gradaccum.kit import redistributed as redistributed_fields
from gradaccum_jax.arrays import Array, Tree, is_key
from gradaccum_jax.state import (
    AccumulationState,
    as_read,
    as_stored,
    fields_of,
    find_states,
)
from gradaccum_jax.workers.group import OWN, is_state


def devices_of(state: AccumulationState) -> int | None:
    """Return how many devices share the window of a state from outside of
    `jax.shard_map`; None if the state is one device's.
    """
    axes = jnp.ndim(state.weight) - jnp.ndim(state.micro_step)
    return int(jnp.shape(state.weight)[0]) if axes else None


def require_layout(tree: Tree, devices: int) -> None:
    for state in find_states(tree):
        state_devices = devices_of(state)
        if state_devices == devices:
            continue
        if state_devices is None:
            found = "the state of a window that no devices share"
            fix = (
                "Make it by tx.init(params), of a tx wrapped with axis_name= and mesh=."
            )
        else:
            found = f"one that {state_devices} devices share"
            fix = f"Write state = gradaccum_jax.redistributed(state, {devices})."
        raise explain(
            UsageError,
            "state",
            expected=f"that of a window that {devices} devices share",
            found=found,
            fix=fix,
        )


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

    Raises:
        ArgumentTypeError: `state` holds no such state, or `workers` is no int.
        ArgumentValueError: `workers` is below 1.
    """
    kind: type[GradAccumError] | None = None
    if isinstance(workers, bool) or not isinstance(workers, int):
        kind = ArgumentTypeError
    elif workers < 1:
        kind = ArgumentValueError
    if kind is not None:
        raise explain(
            kind,
            "workers",
            expected="an int >= 1",
            got=workers,
            fix="Write workers=mesh.shape['data'].",
        )
    states = find_states(state)
    if not states or None in map(devices_of, states):
        raise explain(
            ArgumentTypeError,
            "state",
            expected="the state of a window that devices share",
            found=f"a {type(state).__name__} without one",
            fix="Pass what a step under gradaccum_jax.data_parallel returned.",
        )
    return jax.tree.map(
        lambda part: _spread(part, workers) if is_state(part) else part,
        state,
        is_leaf=is_state,
    )


def _spread(state: AccumulationState, workers: int) -> AccumulationState:
    devices = devices_of(state) or 1
    if devices == workers:
        return state
    # From the host, so that what is saved on one mesh can go to another.
    state = jax.tree.map(
        lambda leaf: leaf if is_key(leaf) else jnp.asarray(jax.device_get(leaf)), state
    )
    after = redistributed_fields(
        [_fields_of_device(state, rank) for rank in range(devices)], workers
    )

    def on_first_device(leaf: Array) -> Array:
        rows = jnp.zeros((workers, *leaf.shape[1:]), leaf.dtype)
        return rows.at[0].set(leaf.sum(0, dtype=leaf.dtype))

    spread: AccumulationState = state._replace(
        weight=jnp.asarray([fields.weight for fields in after], state.weight.dtype),
        overflow=jnp.asarray([fields.overflow for fields in after]),
        last_overflow=jnp.broadcast_to(state.last_overflow.any(), (workers,)),
        accumulator=jax.tree.map(on_first_device, state.accumulator),
        loss=as_stored(on_first_device(as_read(state.loss))),
    )
    return spread


def _fields_of_device(state: AccumulationState, rank: int) -> State:
    fields = dict(zip(State._fields, fields_of(state), strict=True))
    for name in fields.keys() & OWN:
        fields[name] = fields[name][rank]
    return State(**fields)
