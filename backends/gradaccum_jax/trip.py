"""A loop of one trip or none, and what `jax.vmap` makes of it.

JAX's own rule lets every member of a batch run the body if one of them wants it, and keeps the old values of the others by selects: each
array the body writes in place is then copied first, in every window, although members mostly close their windows together. Here
the body runs on the whole batch, in place, where all members want it; and where only some do, for each of those by itself.

The members' axis has no name inside: an inner optimizer that reduces over ``jax.vmap(..., axis_name=...)`` is refused, and pointed
to ``control_flow="cond"``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap
from jax.extend import core

from gradaccum import UsageError, explain

T = TypeVar("T")
Leaves = list[Any]
Run = Callable[[Leaves, Leaves], Leaves]
"""``run(constants, leaves)``: new leaves, of the same shapes and dtypes."""


def zero_or_one(predicate: Any, function: Callable[[T], T], operand: T) -> T:
    """``function(operand)`` where `predicate`, a bool scalar, holds, else `operand`; what `function` closes over may be traced.

    Raises:
        UsageError: `function` reduces over a named axis of the `jax.vmap` that this is under.
    """
    leaves, structure = jax.tree.flatten(jax.tree.map(jnp.asarray, operand))
    closed = jax.make_jaxpr(lambda *flat: jax.tree.leaves(function(jax.tree.unflatten(structure, flat))))(*leaves)
    constants = [jnp.asarray(constant) for constant in closed.consts]

    def run(constants: Leaves, leaves: Leaves) -> Leaves:
        return list(core.jaxpr_as_fun(core.ClosedJaxpr(closed.jaxpr, constants))(*leaves))

    return cast(T, jax.tree.unflatten(structure, _trip(run, jnp.asarray(predicate), constants, leaves, named_axes(closed))))


def _trip(run: Run, predicate: Any, constants: Leaves, leaves: Leaves, named: frozenset[str] = frozenset()) -> Leaves:
    dtypes = jax.tree.map(lambda leaf: leaf.dtype, (predicate, constants, leaves))

    @custom_vmap
    def loop(predicate: Any, constants: Leaves, leaves: Leaves) -> Leaves:
        def body(carry: tuple[Any, Leaves]) -> tuple[Any, Leaves]:
            return jnp.zeros_like(carry[0]), run(constants, carry[1])

        return lax.while_loop(lambda carry: carry[0], body, (predicate, leaves))[1]

    @loop.def_vmap
    def _(size: int, batched: Any, predicate: Any, constants: Leaves, leaves: Leaves) -> tuple[Leaves, list[bool]]:
        _require_no_axis(named)
        predicate, constants, leaves = jax.tree.map(_typed, (predicate, constants, leaves), dtypes)
        several, axes, spread = batched[0], [0 if one else None for one in batched[1]], batched[2]
        leaves = [leaf if own else jnp.broadcast_to(leaf, (size, *leaf.shape)) for leaf, own in zip(leaves, spread, strict=True)]
        leaves = _trip(jax.vmap(run, (axes, 0)), jnp.all(predicate), constants, leaves)
        if several:
            leaves = _one_by_one(run, predicate & ~jnp.all(predicate), axes, constants, leaves)
        return leaves, [True] * len(leaves)

    return list(loop(predicate, constants, leaves))


def _one_by_one(run: Run, wanted: Any, axes: list[Any], constants: Leaves, leaves: Leaves) -> Leaves:
    """`run` on those members of the batch that are `wanted`."""

    def all_members(given: Leaves, leaves: Leaves) -> Leaves:
        *constants, wanted = given

        def member(index: Any, leaves: Leaves) -> Leaves:
            own = [constant if axis is None else _take(constant, index) for constant, axis in zip(constants, axes, strict=True)]
            made = _trip(run, wanted[index], own, [_take(leaf, index) for leaf in leaves])
            return [lax.dynamic_update_index_in_dim(leaf, new, index, 0) for leaf, new in zip(leaves, made, strict=True)]

        return cast(Leaves, lax.fori_loop(0, wanted.shape[0], member, leaves))

    return _trip(all_members, jnp.any(wanted), [*constants, wanted], leaves)


def named_axes(closed: Any) -> frozenset[str]:
    """Those that a traced function reduces over, or asks for its place on."""
    return frozenset(effect.name for effect in closed.effects if type(effect).__name__ == "NamedAxisEffect")


def _require_no_axis(named: frozenset[str]) -> None:
    """Under vmap, only the axes of a mesh still have their names."""
    lost = sorted(named - frozenset(jax.sharding.get_abstract_mesh().manual_axes))
    if lost:
        fix = "Write gradaccum.wrap(..., control_flow='cond')."
        expected = "one that does not reduce over a named axis of jax.vmap"
        raise explain(UsageError, "optimizer", expected=expected, got=f"one that reduces over {lost}", fix=fix)


def _typed(value: Any, dtype: Any) -> Any:
    """JAX hands some constants to a rule as Python numbers."""
    return value if hasattr(value, "dtype") else jnp.asarray(value, dtype)


def _take(leaf: Any, index: Any) -> Any:
    return lax.dynamic_index_in_dim(leaf, index, 0, keepdims=False)
