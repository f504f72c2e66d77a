"""Checks and reductions for devices that share a window, or that store shards of one
model.

Each device has the gradient sum, the weight, the loss and the overflow flag of its own
micro-batches. Everything else must be the same on all devices. Otherwise, some devices
might take a branch that contains an all-reduce, and wait there forever for devices that
did not take the branch. So JAX's types, which show what may differ between devices, are
checked inside `jax.shard_map`.
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
    is_none,
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
"""The names of the fields of an `AccumulationState` whose values differ between
devices.
"""


class ParamsType(Enum):
    """The type that the parameters have while `data_parallel` traces a step. Inside
    `jax.shard_map`, the type of an array says whether the array is the same on all
    devices or may differ between devices. Each type has a disadvantage, which is
    described below, so the step is traced with both types.
    """

    SAME = "same on all devices"
    """The type says that the parameters are the same on all devices. The types of the
    step's results then show which results depend on a device's own batch. The
    disadvantage is that `jax.grad` adds up the gradients over the devices.
    """
    COPY = "a copy for each device"
    """The type says that the parameters may differ between devices, because each device
    has its own copy. `jax.grad` then returns each device's own gradient. The
    disadvantage is that every value that depends on the parameters gets this type too,
    even if it is the same on all devices.
    """


_params_type: ContextVar[ParamsType | None] = ContextVar("params_type", default=None)


@contextmanager
def params_typed_as(params_type: ParamsType) -> Iterator[None]:
    token = _params_type.set(params_type)
    try:
        yield
    finally:
        _params_type.reset(token)


def unchanged(leaf: Array) -> Array:
    return leaf


def by_kind(
    state: AccumulationState, own: OnLeaf, shared: OnLeaf = unchanged
) -> AccumulationState:
    """Apply `own` to the fields of `state` whose values differ between devices, and
    `shared` to the other fields.
    """
    fields = {}
    for name, field in state._asdict().items():
        fields[name] = jax.tree.map(own if name in OWN else shared, field)
    return AccumulationState(**fields)


def require_axes(axes: tuple[str, ...]) -> None:
    """Raise unless the axes belong to a `jax.shard_map` with ``check_vma=True``. Under
    other transformations, such as `jax.pmap` or `jax.vmap`, types do not show which
    values differ between devices.
    """
    for axis in axes:
        index = lax.axis_index(axis)
        if spread_axes((axis,)) - axes_of(index):
            raise UsageError(
                "axis_name: expected an axis of a jax.shard_map with check_vma=True;"
                " got an axis of pmap or vmap, or of a jax.shard_map with"
                " check_vma=False. Use jax.shard_map with its default, check_vma=True."
            )


def same(name: str, tree: T, axes: tuple[str, ...]) -> T:
    """Return `tree`. Raise if JAX's types show that an array in `tree` may differ
    between devices along the mesh axes `axes`. `name` describes `tree` in the error
    message.

    While `data_parallel` traces the step with per-device copies of the parameters (see
    `ParamsType.COPY`), mark each array as the same on all devices instead of checking
    it. In this trace, the check would reject even correct values, because every value
    that is computed from the copies has the type of a value that may differ.
    """
    if _params_type.get() is ParamsType.COPY:
        return replicated(tree, axes)
    require_same(name, tree, axes)
    return tree


def require_same(name: str, tree: Tree, axes: tuple[str, ...]) -> None:
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        differing_axes = axes_of(leaf) & frozenset(axes)
        if differing_axes:
            raise UsageError(
                f"{name}{jax.tree_util.keystr(path)}: expected a value that is the same"
                " on all devices; got a value that may differ along"
                f" {sorted(differing_axes)}, because it depends on a device's own batch"
                " or index. Average it with jax.lax.pmean(value, axis_name), and change"
                " parameters only with the updates that tx.update returns."
            )


def require_shared(name: str, tree: Tree, axes: tuple[str, ...]) -> None:
    """Raise unless everything in `tree` is the same on all devices. The fields in `OWN`
    are exempt, because each device has its own values in them.
    """
    require_same(name, map_by_kind(tree, own=lambda _: None), axes)


def spread_axes(axes: tuple[str, ...]) -> Axes:
    """Return the mesh axes in `axes` that have more than one device. JAX's types may
    omit an axis that has only one device.
    """
    return frozenset(axis for axis in axes if lax.axis_size(axis) > 1)


def require_own(name: str, tree: Tree, axes: tuple[str, ...]) -> None:
    """Raise unless the gradients or the loss in `tree` belong to this device only.

    Inside `jax.shard_map`, `jax.grad` automatically adds up the gradients of replicated
    parameters over the devices, so such gradients are rejected.
    """
    if not axes or _params_type.get() is ParamsType.SAME:
        return
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if spread_axes(axes) - axes_of(leaf):
            raise UsageError(
                f"{name}{jax.tree_util.keystr(path)}: expected the value from this"
                " device's own micro-batch; got a value whose type shows that it was"
                f" already reduced over {axes}. Pass the local loss, without"
                " jax.lax.pmean, and differentiate with respect to per-device copies of"
                " the parameters, made by"
                " gradaccum_jax.data_parallel(step, mesh, axis_name) or"
                " jax.lax.pcast(params, axis_name, to='varying')."
            )


def shared_window(state: AccumulationState, axes: tuple[str, ...]) -> AccumulationState:
    """Give each field of `state` the type that the field has in a window that several
    devices share. The fields in `OWN` get the type of values that may differ between
    devices. All other fields get the type of values that are the same on all devices.
    The caller must ensure that these other fields are in fact the same.
    """
    if not axes:
        return state
    return by_kind(
        state,
        own=lambda leaf: vary(leaf, frozenset(axes)),
        shared=lambda leaf: replicated(leaf, axes),
    )


def map_by_kind(
    tree: Tree,
    *,
    own: OnLeaf = unchanged,
    shared: OnLeaf = unchanged,
    other: OnLeaf = unchanged,
) -> Tree:
    """Apply one of three functions to each leaf of `tree`. `own` is applied to the
    fields of an `AccumulationState` whose values differ between devices, `shared` to
    the other fields of an `AccumulationState`, and `other` to all leaves outside of
    such states.
    """

    def node(part: Any) -> Any:
        if is_state(part):
            return by_kind(part, own, shared)
        return other(part)

    return jax.tree.map(node, tree, is_leaf=is_state)


# Parameters may be sharded by hand inside `jax.shard_map`: each device along
# ``shard_axes`` stores a part of the model.
#
# Then no device has the whole gradient. A device can compute only the norm of its own
# shards, and cannot detect an inf in another device's shards. So the squares of the
# elements are added up over all shards, and all devices make the same decision at the
# end of a window. Each element is counted once, because JAX's types show which arrays
# are sharded and which are replicated.
#
# In an ensemble, each device has its own model. JAX's types do not distinguish such a
# model from a shard. So an error is raised unless ``shard_axes`` says which case
# applies.


def require_known_axes(
    tree: Tree, params: Params, axes: tuple[str, ...], shard_axes: ShardAxes
) -> None:
    names = tuple(sorted(varying_axes(tree) - frozenset(axes)))
    if names and shard_axes is None:
        if params is not None and not varying_axes(params):
            raise UsageError(
                "axis_name: expected the axes along which devices share the window; got"
                f" None, although gradients or weights differ along {names}. Write"
                f" gradaccum.wrap(..., axis_name={names!r}), or reduce gradients"
                f" and pass weight=jax.lax.psum(n, {names!r})."
            )
        raise UsageError(
            "shard_axes: expected the axes along which parameters are sharded; got"
            f" None, although parameters differ between devices along {names}. Write"
            f" gradaccum.wrap(..., shard_axes={names!r}) if the devices store shards of"
            " one model, or shard_axes=() if each device has its own model."
        )


def like_params(
    inner: optax.GradientTransformation, inner_state: InnerState, params: Params
) -> Any:
    """Return the inner optimizer's state, with each array that belongs to a sharded
    parameter marked as sharded like this parameter.
    """

    def vary_like(leaf: Array, parameter: Array) -> Array:
        return None if leaf is None else vary(leaf, axes_of(parameter))

    return optax.tree_utils.tree_map_params(
        inner, vary_like, inner_state, params, is_leaf=is_none
    )


def are_bound(axes: tuple[str, ...]) -> bool:
    """True if this code runs inside a `jax.shard_map`, or another mapping function,
    over the axes in `axes`.
    """
    try:
        return lax.axis_size(axes) > 0
    except NameError:
        return False


def names_of(axis_name: Any) -> tuple[str, ...]:
    """Return the user's `axis_name` (None, one name or several names) as a tuple of
    names.
    """
    if axis_name is None:
        return ()
    return (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)


# All arrays are reduced by one `jax.lax.psum`. XLA compiles this `psum` to a single
# all-reduce, except on a CPU before JAX 0.10. Because of this exception, small arrays
# of the same type are packed into one array. (Sharded and replicated arrays have
# different types.) Large arrays are not packed, because that would cost memory.


LARGE_BYTES = 2**20
"""An array of at least this many bytes is not packed with other arrays, but reduced
separately, in place.
"""


class ReducedWindow(NamedTuple):
    """The values that are reduced over the devices at the end of a window."""

    total: Tree
    weight: Scalar
    overflow: Scalar
    """bool: the overflow flag of the window. After the reduction it is True if the flag
    of any device was True.
    """
    loss: Scalar
    """The sum of the losses of the window's micro-batches."""


def all_reduce(window: ReducedWindow, axes: tuple[str, ...]) -> ReducedWindow:
    """Add up the windows of all devices along the mesh axes `axes`. Return the combined
    window.
    """
    # The gradient sum of an integer parameter is 0 on every device, so it is not
    # reduced.
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
    """Pack `leaves` into one array. Return this array, and a function that unpacks an
    array of the same layout into leaves.
    """
    if len(leaves) == 1:
        return leaves[0], lambda array: [array]
    return ravel_pytree(leaves)  # type: ignore[no-any-return,no-untyped-call]
