"""What differs from device to device in a window that they share, and what does not: told by the types inside `jax.shard_map`.

Each device has the sum, the weight and the overflow flag of its own micro-batches. All else is the same everywhere: devices make the same
calls, and decide on the same reduced gradient. A branch that only some of the devices take would wait in its collective for ever, so
nothing here is left to trust that JAX's types can tell.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar, cast

import jax

from gradaccum import UsageError
from gradaccum.kit import Noise, Scalar, explain
from gradaccum_jax.state import AccumulationState
from gradaccum_jax.types import Array, Extra, Gradients, Params, Tree
from gradaccum_jax.varying import axes_of, vary
from gradaccum_jax.workers.checks import require_checked
from gradaccum_jax.workers.replicated import replicated

T = TypeVar("T")
OnLeaf = Callable[[Array], Any]
OWN = ("weight", "overflow", "accumulator", "last_overflow", "loss")
"""The fields of an `AccumulationState` that each device has for itself. Of `noise` it has the first micro-batch for itself."""
_THERE = "Run it by gradaccum_jax.data_parallel(step, mesh, axis_name), tx.init too, or in a function under jax.shard_map."
_RETURNED = "Pass what tx.init returned under the same axis, each field by its own PartitionSpec."
_copied: ContextVar[bool] = ContextVar("copied", default=False)


def by_kind(state: AccumulationState, own: OnLeaf, shared: OnLeaf) -> AccumulationState:
    """`state` with `own` of the arrays that each device has for itself, and `shared` of the others."""

    def made(name: str, value: Tree) -> Tree:
        if isinstance(value, Noise):
            return Noise(*(own(part) if each.startswith("first") else shared(part) for each, part in value._asdict().items()))
        return jax.tree.map(own if name in OWN else shared, value)

    return AccumulationState(**{name: made(name, value) for name, value in state._asdict().items()})


def require_axes(axes: tuple[str, ...]) -> None:
    """The axes are those of the `jax.shard_map` around this call, which checks what is replicated.

    Raises:
        UsageError: they are not.
    """
    for axis in axes:
        require_checked(axis, _THERE)


@contextmanager
def copies_of_params() -> Iterator[None]:
    """Inside, parameters that may differ by their type are copies of one replicated tree: `data_parallel` made them."""
    token = _copied.set(True)
    try:
        yield
    finally:
        _copied.reset(token)


def require_same_params(params: Params, axes: tuple[str, ...]) -> None:
    """The devices have the same parameters.

    Raises:
        UsageError: they may differ.
    """
    fix = "Pass the parameters as they came into jax.shard_map by in_specs=PartitionSpec(); let only what is differentiated vary."
    same("params", params, axes, fix)


def same_extra(extra: Extra, axes: tuple[str, ...]) -> Extra:
    """The extra arguments of an inner optimizer, `same` on all devices."""
    return same("", extra, axes, "Reduce it first, as in jax.lax.pmean(value, axis_name).")


def same(name: str, tree: T, axes: tuple[str, ...], fix: str) -> T:
    """`tree`, whose arrays are the same on all devices by their types, or, where these cannot tell, by what `origins` finds.

    Raises:
        UsageError: one of them may differ; names it. In `data_parallel` it does so when the step is traced to its end.
    """
    if _copied.get():
        paths = jax.tree_util.tree_map_with_path
        return cast(T, paths(lambda path, leaf: replicated(leaf, axes, asked=f"{name}{jax.tree_util.keystr(path)}"), tree))
    require_same(name, tree, axes, fix)
    return tree


def require_same(name: str, tree: Tree, axes: tuple[str, ...], fix: str) -> None:
    """The arrays of `tree` are the same on all devices, by their types.

    Raises:
        UsageError: one of them may differ; names it.
    """
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        if differing := axes_of(leaf) & frozenset(axes):
            where, found = f"{name}{jax.tree_util.keystr(path)}", f"one that may differ along {sorted(differing)}"
            raise explain(UsageError, where, expected="a value that is the same on all devices", found=found, fix=fix)


def require_shared(state: AccumulationState, axes: tuple[str, ...], fix: str = _RETURNED) -> None:
    """The fields that devices share are the same on all of them.

    Raises:
        UsageError: one may differ; names it.
    """
    require_same("state", by_kind(state, own=lambda _: None, shared=lambda leaf: leaf)._asdict(), axes, fix)


def require_own(gradients: Gradients, accumulator: Tree, axes: tuple[str, ...]) -> None:
    """Every gradient is that of this device alone.

    `jax.grad` inside `jax.shard_map` adds up the gradients of replicated parameters over the devices by itself, in every micro-batch.

    Args:
        gradients: aligned with the leaves of the accumulator.
        accumulator: the tree of sums.
        axes: the names of the axes.

    Raises:
        UsageError: one is the same on all devices: it has been reduced, and would be added up once more.
    """
    paths = [path for path, _ in jax.tree_util.tree_flatten_with_path(accumulator)[0]]
    spread = frozenset(axis for axis in axes if jax.lax.axis_size(axis) > 1)
    for path, gradient in zip(paths, gradients, strict=True):
        if gradient is not None and (reduced := spread - axes_of(gradient)):
            name, found = f"grads{jax.tree_util.keystr(path)}", f"one that is reduced over {sorted(reduced)} already, as its type says"
            cast = "jax.lax.pcast(params, axis_name, to='varying')" if hasattr(jax.lax, "pcast") else "jax.lax.pvary(params, axis_name)"
            fix = f"Differentiate by copies of the parameters, {cast}; gradaccum_jax.data_parallel(step, mesh, axis_name) does so."
            raise explain(UsageError, name, expected="the gradient of this device's own micro-batch", found=found, fix=fix)


def require_own_loss(loss: Scalar, state: AccumulationState, axes: tuple[str, ...]) -> None:
    """The micro-batch's loss belongs to the same devices as its state.

    Args:
        loss: a scalar array; None if it was not told.
        state: the state before the micro-batch.
        axes: the names of the axes whose devices share the window: each tells its own loss, and the window's end adds them up.

    Raises:
        UsageError: it is averaged over such an axis already, or differs along an axis where the devices have one state.
    """
    if loss is None:
        return
    if reduced := frozenset(axis for axis in axes if jax.lax.axis_size(axis) > 1) - axes_of(loss):
        found, fix = f"one that is the same along {sorted(reduced)}, as its type says", "Pass the loss as it was before jax.lax.pmean."
        raise explain(UsageError, "value", expected="the loss of this device's own micro-batch", found=found, fix=fix)
    if differing := axes_of(loss) - axes_of(state.loss):
        found, fix = (
            f"one that may differ along {sorted(differing)}",
            "Average it as the gradients are: jax.lax.pmean(loss, axis_name).",
        )
        raise explain(UsageError, "value", expected="one loss on all devices that have one state", found=found, fix=fix)


def shared_window(state: AccumulationState, axes: tuple[str, ...]) -> AccumulationState:
    """A state that is the same on all devices, with the types of one that they share: its `OWN` fields may differ, the others not."""
    if not axes:
        return state
    return by_kind(state, own=lambda leaf: vary(leaf, frozenset(axes)), shared=lambda leaf: replicated(leaf, axes))


def mapped(tree: Tree, *, own: OnLeaf, shared: OnLeaf, other: OnLeaf) -> Tree:
    """`tree` with `own` and `shared` of the leaves of an `AccumulationState`, and `other` of the leaves outside of one."""

    def node(part: Any) -> Any:
        if not isinstance(part, AccumulationState):
            return other(part)
        return by_kind(part, own, shared)

    return jax.tree.map(node, tree, is_leaf=is_state)


def is_state(part: object) -> bool:
    """Whether `part` is the state of a wrapped optimizer."""
    return isinstance(part, AccumulationState)
