"""Devices that share a window, or shards of one model, as the window sees them.

Each device has the sum, the weight and the overflow flag of its own micro-batches. All
else is the same everywhere, or a branch that only some devices take would wait in its
collective for ever. So the types inside `jax.shard_map` are checked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple, TypeVar, cast

import jax
import jax.numpy as jnp
import optax
from jax import lax

from gradaccum import ArgumentTypeError, ArgumentValueError, UsageError
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
_copied: ContextVar[bool] = ContextVar("copied", default=False)


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


@contextmanager
def copies_of_params() -> Iterator[None]:
    """Take parameters that may differ by their type as copies of one replicated tree,
    which `data_parallel` made.
    """
    token = _copied.set(True)
    try:
        yield
    finally:
        _copied.reset(token)


def require_same_params(params: Params, axes: tuple[str, ...]) -> None:
    fix = (
        "Pass the parameters as they came into jax.shard_map by"
        " in_specs=PartitionSpec(); let only what is differentiated vary."
    )
    same("params", params, axes, fix)


def same_extra(extra: Extra, axes: tuple[str, ...]) -> Extra:
    return same(
        "", extra, axes, "Reduce it first, as in jax.lax.pmean(value, axis_name)."
    )


def same(name: str, tree: T, axes: tuple[str, ...], fix: str) -> T:
    """Raise unless the arrays of `tree` are the same on all devices, by their types or
    by `data_parallel.differing`; return it.
    """
    if _copied.get():
        paths = jax.tree_util.tree_map_with_path
        return cast(
            T,
            paths(
                lambda path, leaf: replicated(
                    leaf, axes, asked=f"{name}{jax.tree_util.keystr(path)}"
                ),
                tree,
            ),
        )
    require_same(name, tree, axes, fix)
    return tree


def require_same(name: str, tree: Tree, axes: tuple[str, ...], fix: str) -> None:
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        if differing := axes_of(leaf) & frozenset(axes):
            where, found = (
                f"{name}{jax.tree_util.keystr(path)}",
                f"one that may differ along {sorted(differing)}",
            )
            raise explain(
                UsageError,
                where,
                expected="a value that is the same on all devices",
                found=found,
                fix=fix,
            )


def require_shared(
    state: AccumulationState, axes: tuple[str, ...], fix: str = _RETURNED
) -> None:
    require_same(
        "state",
        by_kind(state, own=lambda _: None, shared=lambda leaf: leaf)._asdict(),
        axes,
        fix,
    )


def require_own(gradients: Gradients, accumulator: Tree, axes: tuple[str, ...]) -> None:
    """Raise unless every gradient is that of this device alone.

    `jax.grad` inside `jax.shard_map` adds up the gradients of replicated parameters
    over the devices by itself.
    """
    if not axes:
        return
    paths = [path for path, _ in jax.tree_util.tree_flatten_with_path(accumulator)[0]]
    spread = frozenset(axis for axis in axes if jax.lax.axis_size(axis) > 1)
    for path, gradient in zip(paths, gradients, strict=True):
        if gradient is not None and (reduced := spread - axes_of(gradient)):
            name, found = (
                f"grads{jax.tree_util.keystr(path)}",
                f"one that is reduced over {sorted(reduced)} already, as its type says",
            )
            cast = (
                "jax.lax.pcast(params, axis_name, to='varying')"
                if hasattr(jax.lax, "pcast")
                else "jax.lax.pvary(params, axis_name)"
            )
            fix = (
                f"Differentiate by copies of the parameters, {cast};"
                " gradaccum_jax.data_parallel(step, mesh, axis_name) does so."
            )
            raise explain(
                UsageError,
                name,
                expected="the gradient of this device's own micro-batch",
                found=found,
                fix=fix,
            )


def require_own_loss(
    loss: Scalar, state: AccumulationState, axes: tuple[str, ...]
) -> None:
    if loss is None:
        return
    if reduced := frozenset(
        axis for axis in axes if jax.lax.axis_size(axis) > 1
    ) - axes_of(loss):
        found, fix = (
            f"one that is the same along {sorted(reduced)}, as its type says",
            "Pass the loss as it was before jax.lax.pmean.",
        )
        raise explain(
            UsageError,
            "value",
            expected="the loss of this device's own micro-batch",
            found=found,
            fix=fix,
        )
    if differing := axes_of(loss) - axes_of(state.loss):
        found, fix = (
            f"one that may differ along {sorted(differing)}",
            "Average it as the gradients are: jax.lax.pmean(loss, axis_name).",
        )
        raise explain(
            UsageError,
            "value",
            expected="one loss on all devices that have one state",
            found=found,
            fix=fix,
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
    tree: Tree, known: Axes, shard_axes: ShardAxes, options: Options
) -> None:
    if shard_axes is not None or not manual_axes():
        return
    axes = [axes_of(leaf) - known for leaf in jax.tree.leaves(tree)]
    differing = frozenset[str]().union(*axes)
    asked = any(norm is not None for norm in (options.clip_norm, options.skip_norm))
    if differing and (asked or any(own != differing for own in axes)):
        found, fix = (
            f"parameters that differ from device to device along {sorted(differing)}",
            _FIX.format(axes=tuple(sorted(differing))),
        )
        raise explain(
            UsageError,
            "shard_axes",
            expected="the axes that shard parameters",
            found=found,
            fix=fix,
        )


def like_params(
    inner: optax.GradientTransformation, held: InnerState, params: Params
) -> Any:
    """Return the inner optimizer's state with each parameter's arrays sharded as the
    parameter is, by its type.
    """
    return optax.tree_utils.tree_map_params(
        inner, _vary_like, held, params, is_leaf=lambda leaf: leaf is None
    )


def _vary_like(leaf: Array, parameter: Array) -> Array:
    return None if leaf is None else vary(leaf, axes_of(parameter))


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
    # JAX may leave an axis of one device out of types
    if axis_name not in axes_of(index) and lax.axis_size(axis_name) > 1:
        found, fix = (
            "an axis of pmap, of vmap, or with check_vma=False",
            "Leave check_vma=True, the default of jax.shard_map.",
        )
        raise explain(
            UsageError,
            "axis_name",
            expected="an axis of a jax.shard_map with check_vma=True",
            found=found,
            fix=fix,
        )


def require_names(axis_name: Any) -> tuple[str, ...]:
    """Raise unless `axis_name` is the name of a mesh axis or several names; return them
    as a tuple.
    """
    if axis_name is None:
        return ()
    names = _as_names("axis_name", axis_name)
    if not names:
        raise explain(
            ArgumentValueError,
            "axis_name",
            expected=_NAMES,
            got=axis_name,
            fix="Write axis_name='data', as in jax.make_mesh.",
        )
    _require_types()
    return names


_NAMES = "the name of a mesh axis, or a tuple of names"


def _as_names(argument: str, value: Any) -> tuple[str, ...]:
    names, fix = (
        (value,) if isinstance(value, str) else value,
        f"Write {argument}='data', as in jax.make_mesh.",
    )
    if not isinstance(names, tuple) or not all(isinstance(name, str) for name in names):
        raise explain(ArgumentTypeError, argument, expected=_NAMES, got=value, fix=fix)
    if not all(names) or len(set(names)) < len(names):
        raise explain(ArgumentValueError, argument, expected=_NAMES, got=value, fix=fix)
    return names


def _require_types() -> None:
    """Raise unless JAX's types say along which axes devices differ."""
    if not KNOWS_AXES:
        fix = (
            "Install a newer one: pip install -U jax. Or leave axis_name and shard_axes"
            " out: XLA partitions the step under jax.jit."
        )
        found = (
            f"JAX {jax.__version__}, whose types do not say what differs from device to"
            " device"
        )
        raise explain(
            UsageError,
            "axis_name",
            expected="a JAX that has jax.shard_map",
            found=found,
            fix=fix,
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


class Window(NamedTuple):
    """The sums over the devices at a window's end."""

    accumulator: Tree
    weight: Scalar
    overflow: Scalar
    """bool; added up: one of them is True."""
    loss: Scalar
    """The sum of the losses."""


def all_reduce(own: Window, axes: tuple[str, ...]) -> Window:
    """Return the window of all devices along `axes` from each device's `own`."""
    # the sum of an integer parameter is 0 on every device
    moving, put = moving_of(own.accumulator)
    numbers = [own.weight, own.overflow.astype(own.weight.dtype), own.loss]
    added = added_up([*moving, *numbers], axes)
    sums, (weight, overflows, loss) = (
        added[: len(moving)],
        added[len(moving) :],
    )
    return Window(
        put(sums, lambda leaf: replicated(leaf, axes)),
        weight,
        overflows > 0,
        loss,
    )


def added_up(leaves: Leaves, axes: tuple[str, ...]) -> Leaves:
    packs: dict[Any, list[int]] = {}
    for index, leaf in enumerate(leaves):
        alone = leaf.nbytes >= LARGE_BYTES or explicitly_sharded(leaf)
        packs.setdefault(index if alone else (leaf.dtype, axes_of(leaf)), []).append(
            index
        )
    sums = lax.psum(
        [_packed([leaves[index] for index in pack]) for pack in packs.values()], axes
    )  # type: ignore[no-untyped-call]
    made = list(leaves)
    for pack, total in zip(packs.values(), sums, strict=True):
        for index, part in zip(
            pack, _unpacked(total, [leaves[index] for index in pack]), strict=True
        ):
            made[index] = part
    return made


def _packed(leaves: Leaves) -> Array:
    return (
        leaves[0]
        if len(leaves) == 1
        else jnp.concatenate([leaf.ravel() for leaf in leaves])
    )


def _unpacked(total: Array, like: Leaves) -> Leaves:
    if len(like) == 1:
        return [total]
    parts, start = [], 0
    for leaf in like:
        parts.append(total[start : start + leaf.size].reshape(leaf.shape))
        start += leaf.size
    return parts
