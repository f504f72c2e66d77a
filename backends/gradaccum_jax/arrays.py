"""Type aliases and helpers for arrays, pytrees, dtypes and batch axes.

Most aliases are `Any` to a type checker, because JAX passes both arrays and tracers to
the same functions.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from gradaccum import ArgumentValueError, kit

Array = Any
"""A value that JAX accepts as an array: a `jax.Array` (concrete or traced), a NumPy
array, or a Python number.
"""

DType = Any
"""A dtype, or a value that `jnp.dtype` converts to a dtype."""

Tree = Any
"""A pytree of arrays, such as a dict, a list, a tuple or a registered class."""

Params = Any
"""The pytree of the model's parameters, or None if the caller passed no parameters."""

Updates = Any
"""A pytree of the optimizer's updates, or of their shapes and dtypes."""

InnerState = Any
"""The pytree of the inner optimizer's state. With master weights it is a pair: the
inner optimizer's own state and the master weights (see `master_weights.on_masters`).
"""

Leaves = list[Array]
"""The leaves of a pytree, in the order of `jax.tree.leaves`."""

Gradients = list[Array]
"""A micro-batch's gradients: one entry per leaf of the accumulator, in the same order.
An entry is None if nothing is added to the corresponding leaf (see `checks.align`).
"""

Axes = frozenset[str]
"""A set of mesh axis names."""

Extra = dict[str, Any]

typeof: Any = jax.typeof
"""`jax.typeof`, declared as `Any` because a type checker rejects its annotations."""


# Trees from users and other libraries may contain flax nnx's variables, optax's
# placeholders, or None instead of an array.


def plain(tree: Tree) -> Tree:
    """Replace each flax nnx variable in `tree` with its array, like `flax.nnx.pure` but
    without importing flax.
    """
    return jax.tree.map(
        lambda node: node[...] if is_variable(node) else node, tree, is_leaf=is_variable
    )


is_none = functools.partial(operator.is_, None)
"""True if the argument is None. With ``is_leaf=is_none``, `jax.tree.map` treats each
None as a leaf. JAX calls this function for every node of a tree, so it is built from
fast functions written in C.
"""


def is_masked(node: object) -> bool:
    """True if `node` is optax's placeholder for a parameter that a mask excludes."""
    return isinstance(node, optax.MaskedNode)


def is_variable(node: object) -> bool:
    return hasattr(type(node), "raw_value")


# At the end of a window, the parameters, the gradients, their sums, and the gradients
# that the inner optimizer receives may all have different dtypes.


class GradientTypes(NamedTuple):
    """The dtypes of the gradients that the inner optimizer receives, one per leaf."""

    dtypes: list[DType]
    """The dtypes to which the gradients are cast before the inner optimizer receives
    them.
    """
    update_dtypes: list[DType]
    """The inner optimizer is traced with gradients of these dtypes, one per leaf, to
    find the dtypes of the updates.

    For a leaf without a gradient, as in a flush, the entry is the dtype of the
    parameter (or of its master weight) if the caller passed the parameters. The entry
    in `dtypes` may be wider, because the gradient sum is passed to the inner optimizer
    without rounding. For all other leaves, the two entries are equal.
    """


def gradient_types(
    accumulator: Tree, params: Params, gradients: Gradients | None
) -> GradientTypes:
    """Return the dtypes of the gradients that the inner optimizer receives: for each
    leaf, the wider of the parameter's dtype and the gradient's dtype. So if a gradient
    has a wider dtype than its parameter, the update has the same dtype as in plain
    optax.

    In a flush the dtypes of the gradients are unknown, so the sum is passed to the
    inner optimizer without rounding.
    """
    totals = jax.tree.leaves(accumulator, is_leaf=is_none)
    parameters: Leaves = [None] * len(totals)
    if params is not None:
        parameters = jax.tree.leaves(params, is_leaf=is_none)
    remaining = iter(gradients or [None] * len(totals))
    types = GradientTypes([], [])
    for total, parameter in zip(totals, parameters, strict=True):
        if total is None:
            continue
        gradient = next(remaining)
        dtype = total.dtype
        if takes_part(total):
            dtype = jnp.result_type(total if gradient is None else gradient)
            if parameter is not None:
                dtype = wider(jnp.result_type(parameter), dtype)
        types.dtypes.append(dtype)
        if gradient is None and parameter is not None:
            dtype = jnp.result_type(parameter)
        types.update_dtypes.append(dtype)
    return types


def takes_part(leaf: Array) -> bool:
    """True if `leaf` has a real or complex floating-point dtype. Parameters of other
    dtypes have no gradient and never change.
    """
    return bool(jnp.issubdtype(jnp.result_type(leaf), jnp.inexact))


def moving_of(tree: Tree) -> tuple[Leaves, Callable[..., Tree]]:
    """Return the leaves of `tree` that have a real or complex floating-point dtype, and
    a function `put`.

    ``put(leaves)`` returns a copy of `tree` in which `leaves` replace these
    floating-point leaves in order. ``put(leaves, still)`` also replaces every other
    leaf with ``still(leaf)``.
    """
    all_leaves, structure = jax.tree.flatten(tree)

    def put(
        leaves: Iterable[Array], still: Callable[[Array], Any] = lambda leaf: leaf
    ) -> Tree:
        moving = iter(leaves)
        return jax.tree.unflatten(
            structure,
            [next(moving) if takes_part(leaf) else still(leaf) for leaf in all_leaves],
        )

    return [leaf for leaf in all_leaves if takes_part(leaf)], put


def is_key(leaf: Array) -> bool:
    return hasattr(leaf, "dtype") and bool(
        jnp.issubdtype(leaf.dtype, jax.dtypes.extended)
    )


def wider(a: DType, b: DType) -> DType:
    a, b = jnp.dtype(a), jnp.dtype(b)
    if a == b:
        return a
    with jax.numpy_dtype_promotion("standard"):
        return jnp.promote_types(a, b)


def cast_like(tree: Tree, like: Tree) -> Tree:
    """Cast each leaf of `tree` to the dtype of the corresponding leaf of `like`, and
    remove JAX's weak types. Where `tree` contains None, use the leaf of `like`.
    """
    return jax.tree.map(_cast, tree, like, is_leaf=is_none)


def strong(tree: Tree) -> Tree:
    """Remove JAX's weak types from `tree`. With weak types, the type of a scan's carry
    could change, which JAX does not allow.
    """
    return cast_like(tree, tree)


def _cast(leaf: Array, like: Array) -> Array:
    if leaf is None:
        return like
    dtype = jnp.result_type(like)
    if jnp.issubdtype(dtype, jax.dtypes.extended):  # random keys are not cast
        return leaf
    return lax.convert_element_type(leaf, dtype)


def is_half(leaf: Array) -> bool:
    """True if `leaf` has a real floating-point dtype narrower than float32, such as
    float16 or bfloat16.
    """
    dtype = jnp.result_type(leaf)
    return bool(jnp.issubdtype(dtype, jnp.floating)) and dtype.itemsize < 4


# The batch axis of an array is the axis along which the items of the batch are stacked.


KEY = "key"
"""Marks an array as a random key, which has no batch axis. `jax.random.fold_in` folds
the index of each micro-batch into the key, so that every micro-batch gets a different
key.
"""
Axis = int | str | None
"""How an array is split into micro-batches: an index >= 0 is the array's batch axis,
None means that every micro-batch gets the whole array, and `KEY` means that the array
is a random key.
"""


def spread_over(prefix: Tree, tree: Tree, argument: str) -> list[Any]:
    """Expand `prefix`, a tree prefix of `tree`, into a list with one value for each
    leaf of `tree`, like `gradaccum.kit.spread`. `argument` is the prefix's name in
    error messages.
    """
    if type(prefix) is list and isinstance(tree, tuple):
        prefix = tuple(prefix)
    values: list[Any] = []

    def add_values(value: Any, below: Tree) -> None:
        values.extend([value] * len(jax.tree.leaves(below)))

    try:
        jax.tree.map(add_values, prefix, tree, is_leaf=is_none)
    except ValueError as error:
        raise ArgumentValueError(
            f"{argument}: expected one value, or a structure with the same outer levels"
            f" as {jax.tree.structure(tree)}; got {prefix!r} ({type(prefix).__name__})."
            " Pass one value for all leaves, or a tree with the same keys and lengths."
        ) from error
    return values


def is_constant(leaf: object) -> bool:
    """True if `leaf` is compiled into the program as a constant. Arrays and floats are
    arguments of the program instead, because their values may change from call to call.
    """
    may_change: Any = jax.Array | np.ndarray | np.generic | float | complex
    return not (isinstance(leaf, may_change) or hasattr(leaf, "__jax_array__"))


def axis_of(path: str, leaf: Array, axis: Any) -> Axis:
    if axis is None:
        return None
    is_one_key = is_key(leaf) and np.shape(leaf) == ()
    if (axis == KEY or is_one_key) and not is_constant(leaf):
        return KEY
    return kit.batch_axis(kit.Leaf(path, leaf), np.shape(leaf), axis)
