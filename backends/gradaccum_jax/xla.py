"""The compiler's tricks: a function that runs once or not at all, a number that is not
copied into every kernel, a program that is partitioned.

Figures are for XLA on the CPU unless they say otherwise.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_batching import custom_vmap
from jax.extend import core
from jax.interpreters import ad, batching, mlir

from gradaccum.kit import Scalar
from gradaccum_jax.arrays import Array, Axes, DType, Leaves, Tree
from gradaccum_jax.sharding import traced_with_axes, vary

T = TypeVar("T")

# The jitted form of a function where its arguments can be traced, else the function
# itself.
#
# Called op by op from Python, the conditionals of a step would compile anew in every
# micro-batch. The jitted form compiles them once. Under `jax.jit` it is inlined and
# costs nothing.


_TRACEABLE = (jax.Array, np.ndarray, np.generic, float)


def call_jitted(
    jitted: Callable[..., Any], function: Callable[..., Any], *arguments: Tree
) -> Any:
    """Call ``jitted(*arguments)``, or ``function(*arguments)`` if a leaf is a function,
    a flag or another static value.
    """
    leaves = jax.tree.leaves(arguments)
    is_traceable = all(map(isinstance, leaves, itertools.repeat(_TRACEABLE)))
    # Sums are wider than gradients by design; a user's "strict" would refuse to mix
    # them.
    with jax.numpy_dtype_promotion("standard"):
        return jitted(*arguments) if is_traceable else function(*arguments)


def traced_once(function: Callable[..., Any], arguments: Tree) -> Callable[..., Any]:
    """Make `function` one equation of the traced program, however often it is called
    with arguments of the types of `arguments`.

    Else JAX evaluates each equation of a loop body several times on its way to the
    compiler.
    """
    leaves = jax.tree.leaves(arguments)
    is_traced = any(map(isinstance, leaves, itertools.repeat(jax.core.Tracer)))
    return jax.jit(function) if is_traced else function


# Functions that run once or not at all, as the device decides.
#
# `jax.vmap` turns a `lax.cond` with a batched predicate into both branches and a select:
# the inner optimizer at full price in every micro-batch. So `run_if` is a `lax.cond`
# with its own rule under `jax.vmap`:
#
# - If all members of the batch want the function, it runs on the whole batch; if some
#   do, on each of them alone. A select over the whole batch would copy it: AdamW with
#   four arrays of 3 x 256 x 256 then has 16 copies (JAX 0.7.1).
# - If XLA partitions the batch over devices, devices would wait for one another: each
#   call computes every member and selects, as `optax.MultiSteps` does.
#
# The derivative is that of a select between the function's result and its argument:
# `jax.custom_batching.custom_vmap` has none in reverse mode.


Traced = Any
"""A `jax.extend.core.ClosedJaxpr`, whose type does not tell of effects' names."""
Run = Callable[[Leaves, Leaves], Leaves]
"""``run(constants, leaves)``: new leaves, of the same shapes and dtypes."""
MemberAxes = list[int | None]
"""For each constant of a batch of members: 0 if each member has its own, None if all
share one.
"""


def run_if(predicate: Scalar, function: Callable[[T], T], operand: T) -> T:
    """Return ``function(operand)`` if `predicate` holds, else `operand`, in its types."""
    leaves, structure = jax.tree.flatten(jax.tree.map(jnp.asarray, operand))
    predicate = jnp.asarray(predicate)

    def flat_function(*leaves: Array) -> Leaves:
        return jax.tree.leaves(function(jax.tree.unflatten(structure, leaves)))

    closed, leaves, axes = traced_with_axes(
        predicate, traced_once(flat_function, predicate), leaves
    )
    run = _runner(closed.jaxpr, axes)
    constants = [jnp.asarray(constant) for constant in closed.consts]
    choose = _conditional if _has_ordered_effects(closed) else _batchable
    made = choose(run, predicate, constants, leaves)
    return cast(T, jax.tree.unflatten(structure, made))


def _has_ordered_effects(closed: Traced) -> bool:
    """True if the function has effects that happen in order, which JAX refuses in any
    rule but its own.
    """
    return any("Ordered" in type(effect).__name__ for effect in closed.effects)


def _runner(jaxpr: Any, axes: list[Axes]) -> Run:
    """Return the traced function, without any array or tracer: the rules outlive the
    trace that makes them.
    """
    # A program of JAX 0.12 holds its constants' values, which may be tracers. So the
    # constants become arguments.
    arguments = [*jaxpr.constvars, *jaxpr.invars]
    program = core.ClosedJaxpr(jaxpr.replace(constvars=[], invars=arguments), [])

    def run(constants: Leaves, leaves: Leaves) -> Leaves:
        made: Leaves = core.jaxpr_as_fun(program)(*constants, *leaves)
        if not axes:
            return made
        return [vary(leaf, own_axes) for leaf, own_axes in zip(made, axes, strict=True)]

    return run


def _conditional(
    run: Run, predicate: Scalar, constants: Leaves, leaves: Leaves
) -> Leaves:
    made: Any = lax.cond(
        predicate, run, lambda _, leaves: list(leaves), constants, leaves
    )
    return cast(Leaves, made)


def _batchable(
    run: Run, predicate: Scalar, constants: Leaves, leaves: Leaves
) -> Leaves:
    dtypes = jax.tree.map(operator.attrgetter("dtype"), (predicate, constants, leaves))

    @custom_vmap
    def conditional(predicate: Scalar, constants: Leaves, leaves: Leaves) -> Leaves:
        return _conditional(run, predicate, constants, leaves)

    @conditional.def_vmap
    def _(
        size: int, is_batched: Any, predicate: Array, constants: Leaves, leaves: Leaves
    ) -> tuple[Leaves, list[bool]]:
        predicate, constants, leaves = jax.tree.map(
            _as_array, (predicate, constants, leaves), dtypes
        )
        axes: MemberAxes = [0 if batched else None for batched in is_batched[1]]
        leaves = [
            leaf if batched else jnp.broadcast_to(leaf, (size, *leaf.shape))
            for leaf, batched in zip(leaves, is_batched[2], strict=True)
        ]
        if is_batched[0]:
            leaves = _run_members(run, predicate, axes, constants, leaves)
        else:
            leaves = _batchable(jax.vmap(run, (axes, 0)), predicate, constants, leaves)
        return leaves, [True] * len(leaves)

    return list(_with_derivative(conditional, run)(predicate, constants, leaves))


def _as_array(value: Array, dtype: DType) -> Array:
    """Return an array: JAX passes some constants to a rule as Python numbers."""
    return value if hasattr(value, "dtype") else jnp.asarray(value, dtype)


def _with_derivative(
    conditional: Callable[..., Leaves], run: Run
) -> Callable[..., Leaves]:
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

    differentiable = jax.custom_jvp(conditional)
    differentiable.defjvp(rule)
    return differentiable


def _run_members(
    run: Run, is_chosen: Array, axes: MemberAxes, constants: Leaves, leaves: Leaves
) -> Leaves:
    run_all = jax.vmap(run, (axes, 0))

    def by_select(is_chosen: Array, constants: Leaves, leaves: Leaves) -> Leaves:
        return [
            jnp.where(is_chosen.reshape(-1, *[1] * (leaf.ndim - 1)), made, leaf)
            for made, leaf in zip(run_all(constants, leaves), leaves, strict=True)
        ]

    def by_loop(is_chosen: Array, constants: Leaves, leaves: Leaves) -> Leaves:
        all_chosen = jnp.all(is_chosen)
        leaves = _batchable(run_all, all_chosen, constants, leaves)
        return _one_by_one(run, is_chosen & ~all_chosen, axes, constants, leaves)

    made: Any = lax.cond(
        is_partitioned(), by_select, by_loop, is_chosen, constants, leaves
    )
    return cast(Leaves, made)


def _one_by_one(
    run: Run, is_chosen: Array, axes: MemberAxes, constants: Leaves, leaves: Leaves
) -> Leaves:
    def loop(constants: Leaves, leaves: Leaves) -> Leaves:
        *constants, is_chosen = constants

        def run_member(index: Scalar, leaves: Leaves) -> Leaves:
            own_constants = [
                constant if axis is None else _row(constant, index)
                for constant, axis in zip(constants, axes, strict=True)
            ]
            own_leaves = [_row(leaf, index) for leaf in leaves]
            made = _batchable(run, is_chosen[index], own_constants, own_leaves)
            return [
                lax.dynamic_update_index_in_dim(leaf, new, index, 0)
                for leaf, new in zip(leaves, made, strict=True)
            ]

        return cast(Leaves, lax.fori_loop(0, is_chosen.shape[0], run_member, leaves))

    return _batchable(loop, jnp.any(is_chosen), [*constants, is_chosen], leaves)


def _row(leaf: Array, index: Scalar) -> Array:
    return lax.dynamic_index_in_dim(leaf, index, 0, keepdims=False)


# A number that XLA copies into no other kernel.
#
# XLA copies a chain of conjunctions into the fusion of every tensor that uses its end,
# such as whether a micro-batch is finite: n tensors, n chains of n links, and a program
# whose size is the square of the model's. A step of 150 arrays with
# on_overflow="drop_micro_batch" compiled in 22.4 s in place of 15.6 s (JAX 0.7.1). A
# barrier does not stop it, and XLA turns a reduction of the stacked scalars into a
# chain again. It leaves alone a reduction with two results that need each other.


def compute_in_one_kernel(numbers: T) -> T:
    """Return a tree of scalars as it is, out of one kernel that XLA copies into no
    other.
    """
    leaves, structure = jax.tree.flatten(numbers)
    made = _one_kernel.bind(*map(jnp.asarray, leaves))
    return cast(T, jax.tree.unflatten(structure, made))


def _last_of_two(*numbers: Array) -> Leaves:
    if any(number.dtype == jnp.float64 for number in numbers):
        # XLA on the CPU allows no two precisions in one reduction.
        return list(numbers)
    pairs = [jnp.stack([number, number]) for number in numbers]
    starts = [jnp.zeros_like(number) for number in numbers]
    made = lax.reduce(
        (jnp.arange(2), *pairs), (jnp.asarray(-1), *starts), _later_one, (0,)
    )
    return list(made)[1:]


def _later_one(a: Leaves, b: Leaves) -> Leaves:
    is_later = a[0] >= b[0]
    return [lax.select(is_later, left, right) for left, right in zip(a, b, strict=True)]


_one_kernel: Any = core.Primitive("one_kernel")
_one_kernel.multiple_results = True
_one_kernel.def_impl(lambda *numbers: list(numbers))
_one_kernel.def_abstract_eval(lambda *types: list(types))
mlir.register_lowering(_one_kernel, mlir.lower_fun(_last_of_two, multiple_results=True))
_rules: Any = batching.primitive_batchers
_rules[_one_kernel] = lambda numbers, places: (list(numbers), list(places))
ad.primitive_jvps[_one_kernel] = lambda numbers, tangents: (
    _one_kernel.bind(*numbers),
    list(tangents),
)


# Programs that XLA partitions over several devices. JAX knows them only when it lowers
# them.
#
# `jax.jit` traces a function without knowing how its arguments are sharded, and XLA
# partitions the program afterwards. Inside `jax.shard_map` and `jax.pmap` each device
# has a program of its own, and nothing is partitioned.


_partitioned: Any = core.Primitive("partitioned")


def is_partitioned() -> Scalar:
    """Return a bool scalar that is a constant of the lowered program: a conditional on
    it costs nothing at run time.
    """
    return _partitioned.bind()


def _lower_partitioned(context: mlir.LoweringRuleContext) -> Any:
    value = _several_devices(context.module_context.axis_context)
    lower: Any = mlir.lower_fun
    return lower(lambda: jnp.asarray(value), multiple_results=False)(context)


def _several_devices(axis_context: object) -> bool:
    if isinstance(axis_context, mlir.ShardingContext):
        return bool(axis_context.num_devices > 1)
    if isinstance(axis_context, mlir.SPMDAxisContext):
        sizes = [
            size
            for name, size in axis_context.mesh.shape.items()
            if name not in axis_context.manual_axes
        ]
        return bool(math.prod(sizes) > 1)
    return False


_partitioned.def_impl(lambda: jnp.asarray(jax.device_count() > 1))
_partitioned.def_abstract_eval(lambda: jax.core.ShapedArray((), jnp.dtype(bool)))
mlir.register_lowering(_partitioned, _lower_partitioned)
