"""Run a function once or not at all, decided on the device.

Masking runs the function always and keeps the result sometimes: the inner optimizer would cost its full price in every micro-batch.
`lax.cond` avoids that, but `jax.vmap` turns it into both branches and a select once the predicate is batched. So the default is a
`while_loop` that runs zero or one time, and its rule under vmap:

- JAX's own rule runs the body on the whole batch if one member wants it, and selects the old values for the other members. XLA then copies
  each array that the body writes in place, in every window, although members mostly close their windows together.
- Here the body runs on the whole batch, in place, where all members want it. Where only some want it, it runs on each of them alone.
- Where XLA partitions the batch over devices, both of these would make devices wait for one another, or gather the members. There each
  call computes every member and selects, as `optax.MultiSteps` does; no device asks another.
- The members' axis has no name inside. An inner optimizer that reduces over ``jax.vmap(..., axis_name=...)`` is refused, and the error
  points to ``control_flow="cond"``.

A `while_loop` has no reverse mode. Its derivative here is that of a select between the function's result and its argument, which runs the
function in every micro-batch. So ``"cond"`` stays for users who differentiate through the optimizer.
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
from gradaccum.kit import Scalar, explain
from gradaccum_jax.devices import partitioned
from gradaccum_jax.jitted import traced_once
from gradaccum_jax.types import Array, Axes, DType, Leaves
from gradaccum_jax.varying import axes_of, settled, vary

ControlFlow = Literal["while_loop", "cond"]
CONTROL_FLOWS = ("while_loop", "cond")

T = TypeVar("T")
Traced = Any
"""A `jax.extend.core.ClosedJaxpr`, the program that JAX traced of a function. Its type does not tell of effects' names."""
Run = Callable[[Leaves, Leaves], Leaves]
"""``run(constants, leaves)``: new leaves, of the same shapes and dtypes."""
Batched = list[int | None]
"""For each constant of a batch of members: 0 if each member has its own, None if all share one."""


def require_control_flow(value: object) -> ControlFlow:
    """`value` if it is one of `CONTROL_FLOWS`.

    Raises:
        ArgumentValueError: it is not.
    """
    if value == "while_loop":
        return "while_loop"
    if value == "cond":
        return "cond"
    raise explain(ArgumentValueError, "control_flow", expected=f"one of {CONTROL_FLOWS}", got=value, fix="Leave it out, or write 'cond'.")


def once(predicate: Scalar, function: Callable[[T], T], operand: T, control_flow: ControlFlow) -> T:
    """``function(operand)`` where `predicate` holds, else `operand` itself.

    Args:
        predicate: bool scalar.
        function: returns the structure, shapes and dtypes of its argument.
        operand: a tree of arrays.
        control_flow: ``"while_loop"`` or ``"cond"``.

    Raises:
        UsageError: the function reduces over a named axis of the `jax.vmap` that the loop is under.
    """
    leaves, structure = jax.tree.flatten(jax.tree.map(jnp.asarray, operand))
    predicate = jnp.asarray(predicate)

    def flat(*leaves: Array) -> Leaves:
        return jax.tree.leaves(function(jax.tree.unflatten(structure, leaves)))

    closed, leaves = settled(predicate, traced_once(flat, predicate), leaves)
    run = _runner(closed.jaxpr, leaves)
    if control_flow == "cond":
        leaves = lax.cond(predicate, run, lambda _, leaves: leaves, closed.consts, leaves)
    else:
        leaves = _zero_or_one(run, closed, predicate, leaves)
    return cast(T, jax.tree.unflatten(structure, leaves))


def named_axes(closed: Traced) -> Axes:
    """The named axes that a traced function reduces over, or asks for its place on."""
    return frozenset(effect.name for effect in closed.effects if type(effect).__name__ == "NamedAxisEffect")


def _runner(jaxpr: Any, leaves: Leaves) -> Run:
    """The traced function. It holds no array and no tracer, because the rules below outlive the trace that makes them."""
    axes = [axes_of(leaf) for leaf in leaves]

    def run(constants: Leaves, leaves: Leaves) -> Leaves:
        made = core.jaxpr_as_fun(core.ClosedJaxpr(jaxpr, constants))(*leaves)
        return [vary(leaf, own) for leaf, own in zip(made, axes, strict=True)]

    return run


def _zero_or_one(run: Run, closed: Traced, predicate: Scalar, leaves: Leaves) -> Leaves:
    constants = [jnp.asarray(constant) for constant in closed.consts]
    if _has_ordered_effects(closed):
        return _loop(run, predicate, constants, leaves)
    return _batchable_loop(run, predicate, constants, leaves, named_axes(closed))


def _loop(run: Run, predicate: Scalar, constants: Leaves, leaves: Leaves) -> Leaves:
    def body(carry: tuple[Scalar, Leaves]) -> tuple[Scalar, Leaves]:
        return carry[0] & False, run(constants, carry[1])

    return lax.while_loop(lambda carry: carry[0], body, (predicate, leaves))[1]


def _batchable_loop(run: Run, predicate: Scalar, constants: Leaves, leaves: Leaves, named: Axes = frozenset()) -> Leaves:
    dtypes = jax.tree.map(lambda leaf: leaf.dtype, (predicate, constants, leaves))

    @custom_vmap
    def loop(predicate: Scalar, constants: Leaves, leaves: Leaves) -> Leaves:
        return _loop(run, predicate, constants, leaves)

    @loop.def_vmap
    def _(size: int, batched: Any, predicate: Array, constants: Leaves, leaves: Leaves) -> tuple[Leaves, list[bool]]:
        _require_no_axis(named)
        predicate, constants, leaves = jax.tree.map(_typed, (predicate, constants, leaves), dtypes)
        several, axes, spread = batched[0], [0 if one else None for one in batched[1]], batched[2]
        leaves = [leaf if own else jnp.broadcast_to(leaf, (size, *leaf.shape)) for leaf, own in zip(leaves, spread, strict=True)]
        if several:
            leaves = _members(run, predicate, axes, constants, leaves)
        else:
            leaves = _batchable_loop(jax.vmap(run, (axes, 0)), predicate, constants, leaves)
        return leaves, [True] * len(leaves)

    return list(_with_derivative(loop, run)(predicate, constants, leaves))


def _with_derivative(loop: Callable[..., Leaves], run: Run) -> Callable[..., Leaves]:
    def by_conditional(predicate: Scalar, constants: Leaves, leaves: Leaves) -> Leaves:
        return cast(Leaves, lax.cond(predicate, lambda: run(constants, leaves), lambda: list(leaves)))

    def by_select(predicate: Scalar, constants: Leaves, leaves: Leaves) -> Leaves:
        # Where the predicate is False, run's derivative may be inf. The select keeps 0 x inf out of the derivative of the old values.
        shielded = jax.tree.map(lambda leaf: jnp.where(predicate, leaf, lax.stop_gradient(leaf)), (constants, leaves))
        return [jnp.where(predicate, made, leaf) for made, leaf in zip(run(*shielded), leaves, strict=True)]

    def rule(primals: Any, tangents: Any) -> tuple[Leaves, Leaves]:
        # The derivative of the conditional itself would be cheaper, but has no reverse mode once jax.vmap batches its predicate.
        return by_conditional(*primals), jax.jvp(by_select, primals, tangents)[1]

    differentiable = jax.custom_jvp(loop)
    differentiable.defjvp(rule)
    return differentiable


def _members(run: Run, wanted: Array, axes: Batched, constants: Leaves, leaves: Leaves) -> Leaves:
    """`run` on the members of the batch that are `wanted`."""
    whole = jax.vmap(run, (axes, 0))

    def masked(wanted: Array, constants: Leaves, leaves: Leaves) -> Leaves:
        made = whole(constants, leaves)
        return [jnp.where(wanted.reshape(-1, *[1] * (leaf.ndim - 1)), new, leaf) for new, leaf in zip(made, leaves, strict=True)]

    def looped(wanted: Array, constants: Leaves, leaves: Leaves) -> Leaves:
        leaves = _batchable_loop(whole, jnp.all(wanted), constants, leaves)
        return _one_by_one(run, wanted & ~jnp.all(wanted), axes, constants, leaves)

    return cast(Leaves, lax.cond(partitioned(), masked, looped, wanted, constants, leaves))


def _one_by_one(run: Run, wanted: Array, axes: Batched, constants: Leaves, leaves: Leaves) -> Leaves:
    def all_members(given: Leaves, leaves: Leaves) -> Leaves:
        *constants, wanted = given

        def member(index: Scalar, leaves: Leaves) -> Leaves:
            own = [constant if axis is None else _take(constant, index) for constant, axis in zip(constants, axes, strict=True)]
            made = _batchable_loop(run, wanted[index], own, [_take(leaf, index) for leaf in leaves])
            return [lax.dynamic_update_index_in_dim(leaf, new, index, 0) for leaf, new in zip(leaves, made, strict=True)]

        return cast(Leaves, lax.fori_loop(0, wanted.shape[0], member, leaves))

    return _batchable_loop(all_members, jnp.any(wanted), [*constants, wanted], leaves)


def _has_ordered_effects(closed: Traced) -> bool:
    """`jax.vmap` refuses effects that happen in order, and JAX 0.7 refuses them in any rule but its own."""
    return any("Ordered" in type(effect).__name__ for effect in closed.effects)


def _require_no_axis(named: Axes) -> None:
    """Under vmap, only the axes of a mesh still have their names."""
    lost = sorted(named - frozenset(jax.sharding.get_abstract_mesh().manual_axes))
    if lost:
        fix = "Write gradaccum.wrap(..., control_flow='cond')."
        expected = "one that does not reduce over a named axis of jax.vmap"
        raise explain(UsageError, "optimizer", expected=expected, found=f"one that reduces over {lost}", fix=fix)


def _typed(value: Array, dtype: DType) -> Array:
    """JAX hands some constants to a rule as Python numbers."""
    return value if hasattr(value, "dtype") else jnp.asarray(value, dtype)


def _take(leaf: Array, index: Scalar) -> Array:
    return lax.dynamic_index_in_dim(leaf, index, 0, keepdims=False)
