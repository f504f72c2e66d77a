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
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from gradaccum import (
    ArgumentTypeError,
    ArgumentValueError,
    GradAccumError,
    UsageError,
)
from gradaccum.kit import Options, Scalar, explain
from gradaccum_jax.arrays import (
    Array,
    Axes,
    Extra,
    Gradients,
    InnerState,
    Leaves,
    Params,
    Tree,
    moving_of,
)
from gradaccum_jax.sharding import (
    KNOWS_AXES,
    ShardAxes,
    axes_of,
    explicitly_sharded,
    manual_axes,
    replicated,
    vary,
)
from gradaccum_jax.state import AccumulationState

T = TypeVar("T")
OnLeaf = Callable[[Array], Any]
OWN = ("weight", "overflow", "accumulator", "last_overflow", "loss")
"""The fields of an `AccumulationState` that each device has for itself."""
_THERE = (
    "Run it by gradaccum_jax.data_parallel(step, mesh, axis_name), or in a function"
    " under jax.shard_map. For tx.init it is enough to wrap with mesh=mesh, or to set"
    " the mesh around it."
)
_RETURNED = (
    "Pass what tx.init returned under the same axis, each field by its own"
    " PartitionSpec."
)
AVERAGE = (
    "Change parameters by what tx.update returns; average all else over the devices:"
    " jax.lax.pmean(value, axis_name)."
)


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
    return AccumulationState(
        **{
            name: jax.tree.map(own if name in OWN else shared, value)
            for name, value in state._asdict().items()
        }
    )


def require_axes(axes: tuple[str, ...]) -> None:
    """Raise unless the axes are those of a `jax.shard_map` that checks what is
    replicated.
    """
    for axis in axes:
        require_checked(axis, _THERE)


def require_same_params(params: Params, axes: tuple[str, ...]) -> None:
    fix = (
        "Pass the parameters as they came into jax.shard_map by"
        " in_specs=PartitionSpec(); let only what is differentiated vary."
    )
    same("params", params, axes, fix)


def same_extra(extra: Extra, axes: tuple[str, ...]) -> Extra:
    fix = "Reduce it first, as in jax.lax.pmean(value, axis_name)."
    return same("", extra, axes, fix)


def same(name: str, tree: T, axes: tuple[str, ...], fix: str) -> T:
    """Raise unless the arrays of `tree` are the same on all devices by their types;
    return them so typed.
    """
    params_type = _params_type.get()
    if params_type is ParamsType.COPY:
        return replicated(tree, axes)
    require_same(name, tree, axes, AVERAGE if params_type else fix)
    return tree


def require_same(name: str, tree: Tree, axes: tuple[str, ...], fix: str) -> None:
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        differing_axes = axes_of(leaf) & frozenset(axes)
        if differing_axes:
            raise explain(
                UsageError,
                f"{name}{jax.tree_util.keystr(path)}",
                expected="a value that is the same on all devices",
                found=f"one that may differ along {sorted(differing_axes)}, as it is"
                " made of a device's own batch or place",
                fix=fix,
            )


def require_shared(
    state: AccumulationState, axes: tuple[str, ...], fix: str = _RETURNED
) -> None:
    shared_fields = by_kind(state, own=lambda _: None, shared=lambda leaf: leaf)
    require_same("state", shared_fields._asdict(), axes, fix)


def spread_axes(axes: tuple[str, ...]) -> Axes:
    """Return those of `axes` that have several devices: JAX may leave an axis of one
    device out of types.
    """
    return frozenset(axis for axis in axes if lax.axis_size(axis) > 1)


def require_own(gradients: Gradients, accumulator: Tree, axes: tuple[str, ...]) -> None:
    """Raise unless every gradient is that of this device alone.

    `jax.grad` inside `jax.shard_map` adds up the gradients of replicated parameters
    over the devices by itself.
    """
    if not axes or _params_type.get() is ParamsType.SAME:
        return
    paths = [path for path, _ in jax.tree_util.tree_flatten_with_path(accumulator)[0]]
    for path, gradient in zip(paths, gradients, strict=True):
        if gradient is None:
            continue
        reduced_axes = spread_axes(axes) - axes_of(gradient)
        if reduced_axes:
            cast = "jax.lax.pvary(params, axis_name)"
            if hasattr(jax.lax, "pcast"):
                cast = "jax.lax.pcast(params, axis_name, to='varying')"
            raise explain(
                UsageError,
                f"grads{jax.tree_util.keystr(path)}",
                expected="the gradient of this device's own micro-batch",
                found=f"one that is reduced over {sorted(reduced_axes)} already, as its"
                " type says",
                fix=f"Differentiate by copies of the parameters, {cast};"
                " gradaccum_jax.data_parallel(step, mesh, axis_name) does so.",
            )


def require_own_loss(
    loss: Scalar, state: AccumulationState, axes: tuple[str, ...]
) -> None:
    if loss is None or _params_type.get() is ParamsType.SAME:
        return
    reduced_axes = spread_axes(axes) - axes_of(loss)
    if reduced_axes:
        raise explain(
            UsageError,
            "value",
            expected="the loss of this device's own micro-batch",
            found=f"one that is the same along {sorted(reduced_axes)}, as its type"
            " says",
            fix="Pass the loss as it was before jax.lax.pmean.",
        )
    differing_axes = axes_of(loss) - axes_of(state.loss)
    if differing_axes:
        raise explain(
            UsageError,
            "value",
            expected="one loss on all devices that have one state",
            found=f"one that may differ along {sorted(differing_axes)}",
            fix="Average it as the gradients are: jax.lax.pmean(loss, axis_name).",
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


def mapped(tree: Tree, *, own: OnLeaf, shared: OnLeaf, other: OnLeaf) -> Tree:
    """Map `own` and `shared` over the leaves of an `AccumulationState` in `tree`, and
    `other` over the leaves outside of one.
    """

    def node(part: Any) -> Any:
        if not isinstance(part, AccumulationState):
            return other(part)
        return by_kind(part, own, shared)

    return jax.tree.map(node, tree, is_leaf=is_state)


def is_state(part: object) -> bool:
    return isinstance(part, AccumulationState)


# Parameters sharded by hand, inside `jax.shard_map`: the devices along ``shard_axes``
# hold parts of one model.
#
# There one device does not see all of a window: it has the norm of its own shards, and
# no sign of an inf in the others. So the norm adds up the squares of all shards, each
# element once, as JAX's types tell which arrays are sharded and which are copies. And
# all devices decide alike at the end of a window.
#
# A type alone does not tell a shard from a model that each device has for itself, as in
# an ensemble. Where the difference matters, and nobody said, this raises.


_FIX = (
    "Write gradaccum.wrap(..., shard_axes={axes!r}) if the devices hold shards of one"
    " model, shard_axes=() if each has its own."
)


def require_shard_axes(value: object) -> ShardAxes:
    """Raise unless `value` is a name, a tuple of names or None; return a tuple or
    None.
    """
    return None if value is None else _as_names("shard_axes", value)


def require_in_scope(shard_axes: ShardAxes) -> None:
    for axis in shard_axes or ():
        require_checked(
            axis,
            "Call tx.update in a function under jax.shard_map. Under jax.jit alone,"
            " leave shard_axes out.",
        )


def require_told(
    tree: Tree, known_axes: Axes, shard_axes: ShardAxes, options: Options
) -> None:
    if shard_axes is not None or not manual_axes():
        return
    axes = [axes_of(leaf) - known_axes for leaf in jax.tree.leaves(tree)]
    all_axes = frozenset[str]().union(*axes)
    asks_for_norm = (options.clip_norm, options.skip_norm) != (None, None)
    if all_axes and (asks_for_norm or any(leaf != all_axes for leaf in axes)):
        raise explain(
            UsageError,
            "shard_axes",
            expected="the axes that shard parameters",
            found="parameters that differ from device to device along"
            f" {sorted(all_axes)}",
            fix=_FIX.format(axes=tuple(sorted(all_axes))),
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


# The names of axes, and whether JAX's types tell what differs along them.


def are_bound(axes: tuple[str, ...]) -> bool:
    """True if a `jax.shard_map`, or another map, over these axes is around the call."""
    try:
        return bool(axes) and lax.axis_size(axes) > 0
    except NameError:
        return False


def require_checked(axis_name: str, fix: str) -> None:
    _require_types()
    try:
        index = lax.axis_index(axis_name)
    except NameError as error:
        raise explain(
            UsageError,
            "axis_name",
            expected="an axis of the jax.shard_map around it",
            got=axis_name,
            fix=fix,
        ) from error
    if spread_axes((axis_name,)) - axes_of(index):
        raise explain(
            UsageError,
            "axis_name",
            expected="an axis of a jax.shard_map with check_vma=True",
            found="an axis of pmap, of vmap, or with check_vma=False",
            fix="Leave check_vma=True, the default of jax.shard_map.",
        )


def require_names(axis_name: Any) -> tuple[str, ...]:
    """Raise unless `axis_name` is the name of a mesh axis or several names; return them
    as a tuple.
    """
    if axis_name is None:
        return ()
    names = _as_names("axis_name", axis_name)
    if not names:
        raise _names_error(ArgumentValueError, "axis_name", axis_name)
    _require_types()
    return names


def _as_names(argument: str, value: Any) -> tuple[str, ...]:
    names = (value,) if isinstance(value, str) else value
    if not isinstance(names, tuple) or not all(isinstance(name, str) for name in names):
        raise _names_error(ArgumentTypeError, argument, value)
    if not all(names) or len(set(names)) < len(names):
        raise _names_error(ArgumentValueError, argument, value)
    return names


def _names_error(
    kind: type[GradAccumError], argument: str, value: object
) -> GradAccumError:
    return explain(
        kind,
        argument,
        expected="the name of a mesh axis, or a tuple of names",
        got=value,
        fix=f"Write {argument}='data', as in jax.make_mesh.",
    )


def _require_types() -> None:
    """Raise unless JAX's types say along which axes devices differ."""
    if not KNOWS_AXES:
        raise explain(
            UsageError,
            "axis_name",
            expected="a JAX that has jax.shard_map",
            found=f"JAX {jax.__version__}, whose types do not say what differs from"
            " device to device",
            fix="Install a newer one: pip install -U jax. Or leave axis_name and"
            " shard_axes out: XLA partitions the step under jax.jit.",
        )


# One sum over all devices for many arrays.
#
# All of it is one `jax.lax.psum`, of which XLA makes one collective; but on the CPU
# only from JAX 0.10 on. So small arrays of one type travel as one array (shards and
# copies have two types), and large ones by themselves: to pack these would cost memory.
# XLA reduces into new arrays on the CPU, so that a window's end wants room for one more
# sum there.


LARGE_BYTES = 2**20
"""From here on an array travels by itself, in place."""


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
    for index, leaf in enumerate(leaves):
        travels_alone = leaf.nbytes >= LARGE_BYTES or explicitly_sharded(leaf)
        kind = index if travels_alone else (leaf.dtype, axes_of(leaf))
        packs.setdefault(kind, []).append(index)
    packed = [_packed([leaves[index] for index in pack]) for pack in packs.values()]
    reduced = lax.psum(packed, axes)  # type: ignore[no-untyped-call]
    sums = list(leaves)
    for pack, total in zip(packs.values(), reduced, strict=True):
        parts = _unpacked(total, [leaves[index] for index in pack])
        for index, part in zip(pack, parts, strict=True):
            sums[index] = part
    return sums


def _packed(leaves: Leaves) -> Array:
    if len(leaves) == 1:
        return leaves[0]
    return jnp.concatenate([leaf.ravel() for leaf in leaves])


def _unpacked(total: Array, like: Leaves) -> Leaves:
    if len(like) == 1:
        return [total]
    ends = np.cumsum([leaf.size for leaf in like])
    parts = jnp.split(total, ends[:-1].tolist())
    return [part.reshape(leaf.shape) for part, leaf in zip(parts, like, strict=True)]
