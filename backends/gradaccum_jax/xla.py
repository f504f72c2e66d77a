"""Functions that run once or not at all, as the device decides.

`jax.vmap` turns a `lax.cond` with a batched predicate into both branches and a select:
the inner optimizer at full price in every micro-batch. So `once` is a `lax.cond` with
its own rule under `jax.vmap`:

- If all members of the batch want the function, it runs on the whole batch; if some do,
  on each of them alone. A select over the whole batch would copy it: AdamW with four
  arrays of 3 x 256 x 256 then has 16 copies (JAX 0.7.1).
- If XLA partitions the batch over devices, devices would wait for one another: each
  call computes every member and selects, as `optax.MultiSteps` does.

The derivative is that of a select between the function's result and its argument:
`jax.custom_batching.custom_vmap` has none in reverse mode.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_batching import custom_vmap
from jax.extend import core

from gradaccum.kit import Scalar
from gradaccum_jax.arrays import Array, Axes, DType, Leaves, Tree
from gradaccum_jax.sharding import partitioned, traced_with_axes, vary

# Call the jitted form of a function where its arguments can be traced, else the
# function itself.
#
# Called op by op from Python, the loop and the conditional of a step would compile anew
# in every micro-batch. The jitted form compiles them once. Under `jax.jit` it is
# inlined and costs nothing.


_TRACEABLE = (jax.Array, np.ndarray, np.generic, float)


def call_jitted(
    jitted: Callable[..., Any], plain: Callable[..., Any], *arguments: Tree
) -> Any:
    """Call ``jitted(*arguments)``, or ``plain(*arguments)`` if a leaf is a function, a
    flag or another static value.
    """
    traceable = all(
        map(isinstance, jax.tree.leaves(arguments), itertools.repeat(_TRACEABLE))
    )
    with jax.numpy_dtype_promotion(
        "standard"
        # Sums are wider than gradients by design; a user's "strict" would refuse to mix
        # them.
    ):
        return jitted(*arguments) if traceable else plain(*arguments)


def traced_once(function: Callable[..., Any], like: Tree) -> Callable[..., Any]:
    """Make `function` one equation of the traced program, however often it is called
    with arguments of the same types.

    Else JAX evaluates each equation of a loop body several times on its way to the
    compiler.
    """
    return (
        jax.jit(function)
        if any(
            map(isinstance, jax.tree.leaves(like), itertools.repeat(jax.core.Tracer))
        )
        else function
    )


T = TypeVar("T")
Equation = Any
"""A `jax.extend.core.JaxprEqn`."""
Traced = Any
"""A `jax.extend.core.ClosedJaxpr`, whose type does not tell of effects' names."""
Run = Callable[[Leaves, Leaves], Leaves]
"""``run(constants, leaves)``: new leaves, of the same shapes and dtypes."""
Batched = list[int | None]
"""For each constant of a batch of members: 0 if each member has its own, None if all
share one.
"""


def once(predicate: Scalar, function: Callable[[T], T], operand: T) -> T:
    leaves, structure = jax.tree.flatten(jax.tree.map(jnp.asarray, operand))
    predicate = jnp.asarray(predicate)

    def flat(*leaves: Array) -> Leaves:
        return jax.tree.leaves(function(jax.tree.unflatten(structure, leaves)))

    closed, leaves, axes = traced_with_axes(
        predicate, traced_once(flat, predicate), leaves
    )
    run, constants = (
        _runner(closed.jaxpr, axes),
        [jnp.asarray(constant) for constant in closed.consts],
    )
    decided = (
        _conditional if closed.effects and _happens_in_order(closed) else _batchable
    )
    return cast(
        T, jax.tree.unflatten(structure, decided(run, predicate, constants, leaves))
    )


def named_axes(closed: Traced) -> Axes:
    return frozenset(
        effect.name
        for effect in closed.effects
        if type(effect).__name__ == "NamedAxisEffect"
    )


def programs_in(equation: Equation) -> list[Any]:
    """Return the programs in an equation's parameters, each a
    `jax.extend.core.Jaxpr`.
    """
    held = jax.tree.leaves(list(equation.params.values()), is_leaf=_is_program)
    return [getattr(value, "jaxpr", value) for value in held if _is_program(value)]


def origins(jaxpr: Any, count: int) -> list[int]:
    """Return for each result of a program a set of bits: the first `count` arguments
    that it is made of, and bit number `count` if it is made of anything else.
    """
    other = 1 << count
    bits = [1 << min(place, count) for place in range(len(jaxpr.invars))]
    return _origins(jaxpr, bits, other)


def _origins(jaxpr: Any, given: Sequence[int], other: int) -> list[int]:
    known = dict(zip(jaxpr.invars, given, strict=True))

    def origin(atom: Any) -> int:
        return 0 if isinstance(atom, core.Literal) else known.get(atom, other)

    for equation in jaxpr.eqns:
        bits = [origin(atom) for atom in equation.invars]
        called = _called(equation)
        if called is not None:
            made = _origins(called, bits, other)
        elif equation.effects or equation.primitive.name == "freeze":
            # what comes out of a memory reference may be made of all
            made = [2 * other - 1] * len(equation.outvars)
        else:
            made = [functools.reduce(operator.or_, bits, 0)] * len(equation.outvars)
        known.update(zip(equation.outvars, made, strict=True))
    return [origin(atom) for atom in jaxpr.outvars]


def _called(equation: Equation) -> Any:
    """Return the program that an equation runs once on its arguments; None if it does
    something else.
    """
    within = programs_in(equation)
    if len(within) != 1 or equation.primitive.name == "scan":
        return None
    takes = len(within[0].invars) == len(equation.invars)
    returns = len(within[0].outvars) == len(equation.outvars)
    return within[0] if takes and returns else None


def _is_program(value: object) -> bool:
    return isinstance(value, (core.Jaxpr, core.ClosedJaxpr))


def _runner(jaxpr: Any, axes: list[Axes]) -> Run:
    """Return the traced function, without any array or tracer: the rules outlive the
    trace that makes them.
    """
    # A program of JAX 0.12 holds its constants' values, which may be tracers. So the
    # constants become arguments.
    program = core.ClosedJaxpr(
        jaxpr.replace(constvars=[], invars=[*jaxpr.constvars, *jaxpr.invars]), []
    )

    def run(constants: Leaves, leaves: Leaves) -> Leaves:
        made = core.jaxpr_as_fun(program)(*constants, *leaves)
        return (
            [vary(leaf, own) for leaf, own in zip(made, axes, strict=True)]
            if axes
            else made
        )

    return run


def _conditional(
    run: Run, predicate: Scalar, constants: Leaves, leaves: Leaves
) -> Leaves:
    return cast(
        Leaves,
        lax.cond(predicate, run, lambda _, leaves: list(leaves), constants, leaves),
    )


def _batchable(
    run: Run, predicate: Scalar, constants: Leaves, leaves: Leaves
) -> Leaves:
    dtypes = jax.tree.map(operator.attrgetter("dtype"), (predicate, constants, leaves))

    @custom_vmap
    def decided(predicate: Scalar, constants: Leaves, leaves: Leaves) -> Leaves:
        return _conditional(run, predicate, constants, leaves)

    @decided.def_vmap
    def _(
        size: int, batched: Any, predicate: Array, constants: Leaves, leaves: Leaves
    ) -> tuple[Leaves, list[bool]]:
        predicate, constants, leaves = jax.tree.map(
            _typed, (predicate, constants, leaves), dtypes
        )
        several, axes, spread = (
            batched[0],
            [0 if one else None for one in batched[1]],
            batched[2],
        )
        leaves = [
            leaf if own else jnp.broadcast_to(leaf, (size, *leaf.shape))
            for leaf, own in zip(leaves, spread, strict=True)
        ]
        if several:
            leaves = _members(run, predicate, axes, constants, leaves)
        else:
            leaves = _batchable(jax.vmap(run, (axes, 0)), predicate, constants, leaves)
        return leaves, [True] * len(leaves)

    return list(_with_derivative(decided, run)(predicate, constants, leaves))


def _with_derivative(decided: Callable[..., Leaves], run: Run) -> Callable[..., Leaves]:
    def by_select(predicate: Scalar, constants: Leaves, leaves: Leaves) -> Leaves:
        # Where the predicate is False, run's derivative may be inf. The select keeps 0
        # x inf out of the derivative of the old values.
        shielded = jax.tree.map(
            lambda leaf: jnp.where(predicate, leaf, lax.stop_gradient(leaf)),
            (constants, leaves),
        )
        return [
            jnp.where(predicate, made, leaf)
            for made, leaf in zip(run(*shielded), leaves, strict=True)
        ]

    def rule(primals: Any, tangents: Any) -> tuple[Leaves, Leaves]:
        # The derivative of the conditional itself would be cheaper, but has no reverse
        # mode once jax.vmap batches its predicate.
        return _conditional(run, *primals), jax.jvp(by_select, primals, tangents)[1]

    differentiable = jax.custom_jvp(decided)
    differentiable.defjvp(rule)
    return differentiable


def _members(
    run: Run, wanted: Array, axes: Batched, constants: Leaves, leaves: Leaves
) -> Leaves:
    whole = jax.vmap(run, (axes, 0))

    def masked(wanted: Array, constants: Leaves, leaves: Leaves) -> Leaves:
        made = whole(constants, leaves)
        return [
            jnp.where(wanted.reshape(-1, *[1] * (leaf.ndim - 1)), new, leaf)
            for new, leaf in zip(made, leaves, strict=True)
        ]

    def looped(wanted: Array, constants: Leaves, leaves: Leaves) -> Leaves:
        leaves = _batchable(whole, jnp.all(wanted), constants, leaves)
        return _one_by_one(run, wanted & ~jnp.all(wanted), axes, constants, leaves)

    return cast(
        Leaves, lax.cond(partitioned(), masked, looped, wanted, constants, leaves)
    )


def _one_by_one(
    run: Run, wanted: Array, axes: Batched, constants: Leaves, leaves: Leaves
) -> Leaves:
    def all_members(given: Leaves, leaves: Leaves) -> Leaves:
        *constants, wanted = given

        def member(index: Scalar, leaves: Leaves) -> Leaves:
            own = [
                constant if axis is None else _take(constant, index)
                for constant, axis in zip(constants, axes, strict=True)
            ]
            made = _batchable(
                run, wanted[index], own, [_take(leaf, index) for leaf in leaves]
            )
            return [
                lax.dynamic_update_index_in_dim(leaf, new, index, 0)
                for leaf, new in zip(leaves, made, strict=True)
            ]

        return cast(Leaves, lax.fori_loop(0, wanted.shape[0], member, leaves))

    return _batchable(all_members, jnp.any(wanted), [*constants, wanted], leaves)


def _happens_in_order(closed: Traced) -> bool:
    """True if the function has effects that happen in order, which JAX refuses in any
    rule but its own.
    """
    return any("Ordered" in type(effect).__name__ for effect in closed.effects)


def _typed(value: Array, dtype: DType) -> Array:
    """Return an array: JAX passes some constants to a rule as Python numbers."""
    return value if hasattr(value, "dtype") else jnp.asarray(value, dtype)


def _take(leaf: Array, index: Scalar) -> Array:
    return lax.dynamic_index_in_dim(leaf, index, 0, keepdims=False)
