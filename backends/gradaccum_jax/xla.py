"""Helpers for compilation: call a jitted function from Python, and run a function on
the device only if a condition is true.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_batching import custom_vmap

from gradaccum.kit import Scalar
from gradaccum_jax.arrays import Array, Leaves, Tree
from gradaccum_jax.sharding import manual_axes, with_axes_of_results

T = TypeVar("T")
TRACEABLE = (jax.Array, np.ndarray, np.generic, float)


def call_jitted(jitted_function: Any, *arguments: Tree) -> Any:
    """Call a function that `jax.jit` returned. Outside `jax.jit`, it runs as a compiled
    program, because JAX would otherwise compile the step's conditionals again for every
    micro-batch. Under `jax.jit`, it becomes a part of the surrounding program.

    If a leaf of the arguments is neither an array nor a float, such as a function or a
    flag, the original Python function is called, because `jax.jit` cannot trace
    functions and would hide the values of flags.
    """
    is_traceable = all(
        isinstance(leaf, TRACEABLE) for leaf in jax.tree.leaves(arguments)
    )
    # Allow dtype promotion, because gradients are added to sums of a wider dtype. If
    # the user has set JAX's promotion to "strict", JAX would reject this addition.
    with jax.numpy_dtype_promotion("standard"):
        if is_traceable:
            return jitted_function(*arguments)
        return jitted_function.__wrapped__(*arguments)


def run_if(predicate: Scalar, function: Callable[[T], T], operand: T) -> T:
    """Return ``function(operand)`` if `predicate` is true, else `operand`. The results
    of `function` must have the shapes and dtypes of `operand`.

    If `jax.vmap` batches `predicate`, the conditional becomes a select, and `function`
    runs even if `predicate` is false.
    """
    arrays = jax.tree.map(jnp.asarray, operand)
    if manual_axes():
        function, arrays = with_axes_of_results(predicate, function, arrays)
    return cast(T, lax.cond(predicate, function, lambda arrays: arrays, arrays))


# For each scalar that a branch returns, XLA:CPU compiles a separate kernel, which takes
# about 4 ms (JAX 0.7.1). Only a reduction can return several results from one kernel.
# So each scalar is duplicated, and a reduction selects the second copy. XLA does not
# remove this reduction.


def in_one_kernel(numbers: T) -> T:
    """Return a tree of scalars unchanged, but make XLA compute all scalars in one
    kernel.
    """
    leaves, structure = jax.tree.flatten(numbers)
    # XLA:CPU cannot reduce float32 and float64 arrays together, and JAX rejects a
    # reduction over arrays that vary along different mesh axes.
    if manual_axes() or any(leaf.dtype == jnp.float64 for leaf in leaves):
        return numbers
    return cast(T, jax.tree.unflatten(structure, _reduced(*leaves)))


@jax.custom_jvp
def _reduced(*numbers: Array) -> Leaves:
    return cast(Leaves, _later_of_two(*numbers))


@_reduced.defjvp
def _(primals: Leaves, tangents: Leaves) -> tuple[Leaves, Leaves]:
    return _reduced(*primals), list(tangents)


@custom_vmap
def _later_of_two(*numbers: Array) -> Leaves:
    positions = jnp.arange(2, dtype=jnp.int32)
    pairs = [jnp.stack([number, number]) for number in numbers]
    zeros = [jnp.zeros_like(number) for number in numbers]
    return list(
        lax.reduce((positions, *pairs), (jnp.int32(-1), *zeros), _later, (0,))[1:]
    )


@_later_of_two.def_vmap
def _(size: int, batched: list[bool], *numbers: Array) -> tuple[Leaves, list[bool]]:
    return list(numbers), list(batched)


def _later(a: Leaves, b: Leaves) -> Leaves:
    is_later = a[0] >= b[0]
    return [lax.select(is_later, one, other) for one, other in zip(a, b, strict=True)]
