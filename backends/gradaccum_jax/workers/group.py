"""Devices that share a window, or shards of one model, as the window sees them.

Each device has the sum, the weight and the overflow flag of its own micro-batches. All
else is the same everywhere, or a branch that only some devices take would wait in its
collective for ever. So the types inside `jax.shard_map` are checked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from enum import Enum
from typing import Any, NamedTuple, TypeVar

import jax
import optax
from jax import lax
from jax.flatten_util import ravel_pytree

from gradaccum import UsageError
from gradaccum.kit import Scalar
from gradaccum_jax.arrays import (
    Array,
    Axes,
    InnerState,
    Leaves,
    Params,
    Tree,
    moving_of,
)
from gradaccum_jax.sharding import (
    ShardAxes,
    axes_of,
    explicitly_sharded,
    replicated,
    vary,
    varying_axes,
)
from gradaccum_jax.state import AccumulationState, is_state

T = TypeVar("T")
OnLeaf = Callable[[Array], Any]
OWN = ("weight", "overflow", "accumulator", "last_overflow", "loss")
"""The fields of an `AccumulationState` that each device has for itself."""


class ParamsType(Enum):
    """The type of the parameters in a step of `data_parallel`, which traces it twice."""

    SAME = "same on all devices"
    """So JAX's types tell what is made of a device's own values. But `jax.grad` adds up
    the gradients of such parameters.
    """
    COPY = "a copy for each device"
    """So `jax.grad` returns a device's own gradient. But everything made of parameters
    may differ by its type.
    """


_params_type: ContextVar[ParamsType | None] = ContextVar("params_type", default=None)


@contextmanager
def params_typed_as(params_type: ParamsType) -> Iterator[None]:
    token = _params_type.set(params_type)
    try:
        yield
    finally:
        _params_type.reset(token)


def by_kind(state: AccumulationState, own: OnLeaf, shared: OnLeaf) -> AccumulationState:
    """Map `own` over the fields that each device has for itself, `shared` over the
    rest.
    """
    fields = {}
    for name, field in state._asdict().items():
        fields[name] = jax.tree.map(own if name in OWN else shared, field)
    return AccumulationState(**fields)


def require_axes(axes: tuple[str, ...]) -> None:
    """Raise unless the axes are those of a `jax.shard_map` that checks what is
    replicated: other maps have no types that tell what differs.
    """
    for axis in axes:
        index = lax.axis_index(axis)
        if spread_axes((axis,)) - axes_of(index):
            raise UsageError(
                "axis_name: expected an axis of a jax.shard_map with check_vma=True;"
                " got an axis of pmap, of vmap, or with check_vma=False. Leave"
                " check_vma=True, the default of jax.shard_map."
            )


def same(name: str, tree: T, axes: tuple[str, ...]) -> T:
    """Raise unless the arrays of `tree` are the same on all devices by their types;
    return them so typed.
    """
    if _params_type.get() is ParamsType.COPY:
        return replicated(tree, axes)
    require_same(name, tree, axes)
    return tree


def require_same(name: str, tree: Tree, axes: tuple[str, ...]) -> None:
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        differing_axes = axes_of(leaf) & frozenset(axes)
        if differing_axes:
            raise UsageError(
                f"{name}{jax.tree_util.keystr(path)}: expected a value that is the same"
                " on all devices; got one that may differ along"
                f" {sorted(differing_axes)}, as it is made of a device's own batch or"
                " place. Average it over the devices, jax.lax.pmean(value, axis_name);"
                " change parameters by what tx.update returns."
            )


def require_shared(name: str, tree: Tree, axes: tuple[str, ...]) -> None:
    """Raise unless all in `tree` is the same on all devices but each device's own
    fields of a state.
    """
    require_same(name, map_by_kind(tree, own=lambda _: None), axes)


def spread_axes(axes: tuple[str, ...]) -> Axes:
    """Return those of `axes` that have several devices: JAX may leave an axis of one
    device out of types.
    """
    return frozenset(axis for axis in axes if lax.axis_size(axis) > 1)


def require_own(name: str, tree: Tree, axes: tuple[str, ...]) -> None:
    """Raise unless the gradients or the loss in `tree` are those of this device alone.

    `jax.grad` inside `jax.shard_map` adds up the gradients of replicated parameters
    over the devices by itself.
    """
    if not axes or _params_type.get() is ParamsType.SAME:
        return
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        if spread_axes(axes) - axes_of(leaf):
            raise UsageError(
                f"{name}{jax.tree_util.keystr(path)}: expected what this device's own"
                f" micro-batch gives; got one that is reduced over {axes} already, as"
                " its type says. Differentiate by copies of the parameters, as"
                " gradaccum_jax.data_parallel(step, mesh, axis_name) makes them, or"
                " jax.lax.pcast(params, axis_name, to='varying'). Pass the loss as it"
                " was before jax.lax.pmean."
            )


def shared_window(state: AccumulationState, axes: tuple[str, ...]) -> AccumulationState:
    """Return a state that is the same on all devices with the types of a shared one."""
    if not axes:
        return state
    return by_kind(
        state,
        own=lambda leaf: vary(leaf, frozenset(axes)),
        shared=lambda leaf: replicated(leaf, axes),
    )


def unchanged(leaf: Array) -> Array:
    return leaf


def map_by_kind(
    tree: Tree,
    *,
    own: OnLeaf = unchanged,
    shared: OnLeaf = unchanged,
    other: OnLeaf = unchanged,
) -> Tree:
    """Map `own` and `shared` over the leaves of an `AccumulationState` in `tree`, and
    `other` over the leaves outside of one.
    """

    def node(part: Any) -> Any:
        if is_state(part):
            return by_kind(part, own, shared)
        return other(part)

    return jax.tree.map(node, tree, is_leaf=is_state)


# Parameters sharded by hand, inside `jax.shard_map`: the devices along ``shard_axes``
# hold parts of one model.
#
# There one device does not see all of a window: it has the norm of its own shards, and
# no sign of an inf in the others. So the norm adds up the squares of all shards, each
# element once, as JAX's types tell which arrays are sharded and which are copies. And
# all devices decide alike at the end of a window.
#
# A type alone does not tell a shard from a model that each device has for itself, as in
# an ensemble. If nobody said, this raises.


def require_known_axes(
    tree: Tree, axes: tuple[str, ...], shard_axes: ShardAxes
) -> None:
    names = tuple(sorted(varying_axes(tree) - frozenset(axes)))
    if names and shard_axes is None:
        raise UsageError(
            "shard_axes: expected the axes that shard parameters; got parameters that"
            f" differ from device to device along {names}. Write gradaccum.wrap(...,"
            f" shard_axes={names!r}) if the devices hold shards of one model,"
            " shard_axes=() if each has its own."
        )


def like_params(
    inner: optax.GradientTransformation, inner_state: InnerState, params: Params
) -> Any:
    """Return the inner optimizer's state with each parameter's arrays sharded as the
    parameter is, by its type.
    """

    def vary_like(leaf: Array, parameter: Array) -> Array:
        return None if leaf is None else vary(leaf, axes_of(parameter))

    return optax.tree_utils.tree_map_params(
        inner, vary_like, inner_state, params, is_leaf=lambda leaf: leaf is None
    )


# The names of axes.


def are_bound(axes: tuple[str, ...]) -> bool:
    """True if a `jax.shard_map`, or another map, over these axes is around the call."""
    try:
        return bool(axes) and lax.axis_size(axes) > 0
    except NameError:
        return False


def names_of(axis_name: Any) -> tuple[str, ...]:
    """Return the name of an axis, or several names, as a tuple."""
    if axis_name is None:
        return ()
    return (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)


# One sum over all devices for many arrays.
#
# All of it is one `jax.lax.psum`, of which XLA makes one collective; but on the CPU
# only from JAX 0.10 on. So small arrays of one type are packed into one (shards and
# copies have two types); to pack large ones would cost memory.


LARGE_BYTES = 2**20
"""An array of this size or more is reduced by itself, in place."""


class ReducedWindow(NamedTuple):
    """The sums over the devices at a window's end."""

    total: Tree
    weight: Scalar
    overflow: Scalar
    """bool; added up: one of them is True."""
    loss: Scalar
    """The sum of the losses."""


def all_reduce(window: ReducedWindow, axes: tuple[str, ...]) -> ReducedWindow:
    """Return the window of all devices along `axes` from each device's own."""
    # The sum of an integer parameter is 0 on every device.
    moving, put = moving_of(window.total)
    overflow = window.overflow.astype(window.weight.dtype)
    *sums, weight, overflows, loss = added_up(
        [*moving, window.weight, overflow, window.loss], axes
    )
    total = put(sums, lambda leaf: replicated(leaf, axes))
    return ReducedWindow(total, weight, overflows > 0, loss)


def added_up(leaves: Leaves, axes: tuple[str, ...]) -> Leaves:
    packs: dict[Any, list[int]] = {}
    for place, leaf in enumerate(leaves):
        is_alone = leaf.nbytes >= LARGE_BYTES or explicitly_sharded(leaf)
        kind = place if is_alone else (leaf.dtype, axes_of(leaf))
        packs.setdefault(kind, []).append(place)
    packed = [_packed([leaves[place] for place in places]) for places in packs.values()]
    totals = lax.psum([array for array, _ in packed], axes)  # type: ignore[no-untyped-call]
    sums = list(leaves)
    for places, total, (_, unpack) in zip(packs.values(), totals, packed, strict=True):
        for place, part in zip(places, unpack(total), strict=True):
            sums[place] = part
    return sums


def _packed(leaves: Leaves) -> tuple[Array, Callable[[Array], Leaves]]:
    """Return one array, and the function that takes such an array apart."""
    if len(leaves) == 1:
        return leaves[0], lambda array: [array]
    ravel: Any = ravel_pytree
    array, unravel = ravel(leaves)
    return array, unravel
