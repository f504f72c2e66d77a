"""Run something once or not at all, decided on the device.

Masking (run always, keep the result sometimes) would pay for the inner optimizer in every micro-batch. `lax.cond` does not,
until `vmap` gives it a batched predicate and turns it into both branches and a select. A `lax.while_loop` of zero or one trip
stays a loop under `vmap`: see `trip` for which members it runs, and for its derivative, which masks. So `"cond"` stays for those who
differentiate through the optimizer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeVar, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap
from jax.extend import core

from gradaccum import ArgumentValueError, UsageError
from gradaccum.kit import explain
from gradaccum_jax.devices import partitioned
from gradaccum_jax.varying import axes_of, settled, vary

ControlFlow = Literal["while_loop", "cond"]
CONTROL_FLOWS = ("while_loop", "cond")

T = TypeVar("T")
Leaves = list[Any]
Run = Callable[[Leaves, Leaves], Leaves]
"""``run(constants, leaves)``: new leaves, of the same shapes and dtypes."""


def require_control_flow(value: Any) -> ControlFlow:
    """`value` if it is one of the two.

    Raises:
        ArgumentValueError: it is not.
    """
    if value == "while_loop":
        return "while_loop"
    if value == "cond":
        return "cond"
    raise explain(ArgumentValueError, "control_flow", expected=f"one of {CONTROL_FLOWS}", got=value, fix="Leave it out, or write 'cond'.")


def once(predicate: Any, function: Callable[[T], T], operand: T, control_flow: ControlFlow) -> T:
    """``function(operand)`` where `predicate` holds, else `operand` itself.

    Args:
        predicate: bool scalar.
        function: returns what it was given: same structure, shapes and dtypes.
        operand: a tree of arrays.
        control_flow: ``"while_loop"`` or ``"cond"``.
    """
    leaves, structure = jax.tree.flatten(jax.tree.map(jnp.asarray, operand))
    predicate = jnp.asarray(predicate)

    def flat(*leaves: Any) -> list[Any]:
        return jax.tree.leaves(function(jax.tree.unflatten(structure, leaves)))

    closed, leaves = settled(predicate, flat, leaves)
    if control_flow == "cond":
        run = runner(closed.jaxpr, leaves)
        leaves = lax.cond(predicate, lambda constants, leaves: run(constants, leaves), lambda _, leaves: leaves, closed.consts, leaves)
    else:
        leaves = zero_or_one(predicate, closed, leaves)
    return cast(T, jax.tree.unflatten(structure, leaves))


def zero_or_one(predicate: Any, closed: Any, leaves: Leaves) -> Leaves:
    """What `closed`, a traced function of `leaves`, makes of them where `predicate`, a bool scalar, holds, else `leaves`.

    Raises:
        UsageError: the function reduces over a named axis of the `jax.vmap` that this is under.
    """
    constants = [jnp.asarray(constant) for constant in closed.consts]
    run, named, ordered = runner(closed.jaxpr, leaves), named_axes(closed), _is_ordered(closed)
    return _loop(run, predicate, constants, leaves) if ordered else _trip(run, predicate, constants, leaves, named)


def runner(jaxpr: Any, leaves: Leaves) -> Run:
    """Holds on to no array, and to no tracer: rules outlive the trace that they are made in."""
    axes = [axes_of(leaf) for leaf in leaves]

    def run(constants: Leaves, leaves: Leaves) -> Leaves:
        made = core.jaxpr_as_fun(core.ClosedJaxpr(jaxpr, constants))(*leaves)
        return [vary(leaf, own) for leaf, own in zip(made, axes, strict=True)]

    return run


def _loop(run: Run, predicate: Any, constants: Leaves, leaves: Leaves) -> Leaves:
    def body(carry: tuple[Any, Leaves]) -> tuple[Any, Leaves]:
        return carry[0] & False, run(constants, carry[1])

    return lax.while_loop(lambda carry: carry[0], body, (predicate, leaves))[1]


def _trip(run: Run, predicate: Any, constants: Leaves, leaves: Leaves, named: frozenset[str] = frozenset()) -> Leaves:
    dtypes = jax.tree.map(lambda leaf: leaf.dtype, (predicate, constants, leaves))

    @custom_vmap
    def loop(predicate: Any, constants: Leaves, leaves: Leaves) -> Leaves:
        return _loop(run, predicate, constants, leaves)

    @loop.def_vmap
    def _(size: int, batched: Any, predicate: Any, constants: Leaves, leaves: Leaves) -> tuple[Leaves, list[bool]]:
        _require_no_axis(named)
        predicate, constants, leaves = jax.tree.map(_typed, (predicate, constants, leaves), dtypes)
        several, axes, spread = batched[0], [0 if one else None for one in batched[1]], batched[2]
        leaves = [leaf if own else jnp.broadcast_to(leaf, (size, *leaf.shape)) for leaf, own in zip(leaves, spread, strict=True)]
        if several:
            leaves = _members(run, predicate, axes, constants, leaves)
        else:
            leaves = _trip(jax.vmap(run, (axes, 0)), predicate, constants, leaves)
        return leaves, [True] * len(leaves)

    return list(_with_derivative(loop, run)(predicate, constants, leaves))


def _with_derivative(loop: Callable[..., Leaves], run: Run) -> Callable[..., Leaves]:
    def by_conditional(predicate: Any, constants: Leaves, leaves: Leaves) -> Leaves:
        return cast(Leaves, lax.cond(predicate, lambda: run(constants, leaves), lambda: list(leaves)))

    def by_select(predicate: Any, constants: Leaves, leaves: Leaves) -> Leaves:
        # Where nothing is wanted, run's derivative may be inf; 0 x inf must not reach what is held.
        shielded = jax.tree.map(lambda leaf: jnp.where(predicate, leaf, lax.stop_gradient(leaf)), (constants, leaves))
        return [jnp.where(predicate, made, leaf) for made, leaf in zip(run(*shielded), leaves, strict=True)]

    def rule(primals: Any, tangents: Any) -> tuple[Leaves, Leaves]:
        # The derivative of the conditional itself would be cheaper, but has no reverse mode once jax.vmap batches its predicate.
        return by_conditional(*primals), jax.jvp(by_select, primals, tangents)[1]

    differentiable = jax.custom_jvp(loop)
    differentiable.defjvp(rule)
    return differentiable


def _members(run: Run, wanted: Any, axes: list[Any], constants: Leaves, leaves: Leaves) -> Leaves:
    """`run` on those members of the batch that are `wanted`."""
    whole = jax.vmap(run, (axes, 0))

    def masked(wanted: Any, constants: Leaves, leaves: Leaves) -> Leaves:
        made = whole(constants, leaves)
        return [jnp.where(wanted.reshape(-1, *[1] * (leaf.ndim - 1)), new, leaf) for new, leaf in zip(made, leaves, strict=True)]

    def looped(wanted: Any, constants: Leaves, leaves: Leaves) -> Leaves:
        leaves = _trip(whole, jnp.all(wanted), constants, leaves)
        return _one_by_one(run, wanted & ~jnp.all(wanted), axes, constants, leaves)

    return cast(Leaves, lax.cond(partitioned(), masked, looped, wanted, constants, leaves))


def _one_by_one(run: Run, wanted: Any, axes: list[Any], constants: Leaves, leaves: Leaves) -> Leaves:
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


def _is_ordered(closed: Any) -> bool:
    """Whether it has effects that happen in order; `jax.vmap` refuses those, and JAX 0.7 in any rule but its own."""
    return any("Ordered" in type(effect).__name__ for effect in closed.effects)


def _require_no_axis(named: frozenset[str]) -> None:
    """Under vmap, only the axes of a mesh still have their names."""
    lost = sorted(named - frozenset(jax.sharding.get_abstract_mesh().manual_axes))
    if lost:
        fix = "Write gradaccum.wrap(..., control_flow='cond')."
        expected = "one that does not reduce over a named axis of jax.vmap"
        raise explain(UsageError, "optimizer", expected=expected, found=f"one that reduces over {lost}", fix=fix)


def _typed(value: Any, dtype: Any) -> Any:
    """JAX hands some constants to a rule as Python numbers."""
    return value if hasattr(value, "dtype") else jnp.asarray(value, dtype)


def _take(leaf: Any, index: Any) -> Any:
    return lax.dynamic_index_in_dim(leaf, index, 0, keepdims=False)
