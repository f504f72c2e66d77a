"""Arrays and trees: type aliases, leaves, dtypes and the axes of a batch.

Most aliases are `Any` to a type checker, because JAX passes arrays and tracers to the
same functions.
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

from gradaccum import ArgumentValueError

Array = Any
"""A `jax.Array`, concrete or traced, or a value that JAX accepts as an array: a NumPy
array or a Python number.
"""

DType = Any
"""A dtype, or a value that `jnp.dtype` converts to a dtype."""

Tree = Any
"""A pytree of arrays: dicts, lists, tuples, registered classes."""

Params = Any
"""The tree of the model's parameters; None if the caller passed no parameters."""

Updates = Any
"""The tree of updates, or of their shapes and dtypes."""

InnerState = Any
"""The tree of the inner optimizer's state; with `master_weights.on_masters`, the pair
(its own state, masters).
"""

Leaves = list[Array]
"""The leaves of a tree, in JAX's order."""

Gradients = list[Array]
"""A micro-batch's gradients in the order of the accumulator's leaves, with None where
there is nothing to add: see `checks.align`.
"""

Axes = frozenset[str]
"""Names of mesh axes."""

Extra = dict[str, Any]

typeof: Any = jax.typeof
"""`jax.typeof` as `Any`, because a type checker rejects its annotations."""


# Trees from other libraries and from users: flax nnx's variables, and None instead of a
# leaf.


def plain(tree: Tree) -> Tree:
    """Replace each flax nnx variable with its array, like `flax.nnx.pure` but without
    importing flax.
    """
    return jax.tree.map(
        lambda node: node[...] if is_variable(node) else node, tree, is_leaf=is_variable
    )


is_none = functools.partial(operator.is_, None)
"""True if the argument is None: ``is_leaf=is_none`` keeps each None as a leaf. For
speed it is not a Python function, because JAX calls it for every node.
"""


def is_masked(node: object) -> bool:
    """True if `node` is optax's placeholder for parameters that a mask leaves out."""
    return isinstance(node, optax.MaskedNode)


def is_variable(node: object) -> bool:
    return hasattr(type(node), "raw_value")


# The dtypes that are combined at the end of a window: of the parameters, the gradients,
# the sums, and the gradients that the inner optimizer receives.


class GradientTypes(NamedTuple):
    """The dtypes of the inner optimizer's gradients, leaf by leaf."""

    dtypes: list[DType]
    """The dtypes of the gradients that the optimizer receives."""
    update_dtypes: list[DType]
    """The updates have the dtypes that the optimizer gives them for gradients of these
    dtypes.
    """


def gradient_types(
    accumulator: Tree, params: Params, gradients: Gradients | None
) -> GradientTypes:
    """Return the wider dtype of parameter and gradient for each leaf. A gradient that
    the caller widened then gives the same update as in plain optax.

    In a flush the gradients' dtypes are unknown, so the optimizer receives the sum
    without rounding.
    """
    totals = jax.tree.leaves(accumulator, is_leaf=is_none)
    parameters: Leaves = [None] * len(totals)
    if params is not None:
        parameters = jax.tree.leaves(params, is_leaf=is_none)
    parameters = [
        parameter
        for parameter, total in zip(parameters, totals, strict=True)
        if total is not None
    ]
    totals = jax.tree.leaves(accumulator)
    types = GradientTypes([], [])
    for total, parameter, gradient in zip(
        totals, parameters, gradients or [None] * len(totals), strict=True
    ):
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
    """True if `leaf` has a real or complex floating dtype. Other parameters have no
    gradient and never change.
    """
    return bool(jnp.issubdtype(jnp.result_type(leaf), jnp.inexact))


def moving_of(tree: Tree) -> tuple[Leaves, Callable[..., Tree]]:
    """Return the floating leaves, and a function ``put(leaves, still)`` that returns
    `tree` with `leaves` in their place and every other leaf replaced by
    ``still(leaf)``.
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
    """Cast `tree` to the dtypes of `like`, without weak types; replace each None in
    `tree` with the leaf of `like`.
    """
    return jax.tree.map(_cast, tree, like, is_leaf=is_none)


def strong(tree: Tree) -> Tree:
    """Return `tree` without weak types, because the type of a scan's carry must not
    change.
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
    """True if `leaf` is real and narrower than float32: float16 or bfloat16."""
    dtype = jnp.result_type(leaf)
    return bool(jnp.issubdtype(dtype, jnp.floating)) and dtype.itemsize < 4


# The axes of a batch: the axis of each leaf along which the items lie.


KEY = "key"
"""Marks a random key, instead of an axis; the key is folded with the micro-batch's
number.
"""
Axis = int | str | None
"""A batch axis >= 0; None for a leaf that every micro-batch gets whole; or `KEY`."""


def spread_over(prefix: Tree, tree: Tree, argument: str) -> list[Any]:
    """Return one value of `prefix` for each leaf of `tree`, like
    `gradaccum.kit.spread`.
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
            f"{argument}: expected a prefix of {jax.tree.structure(tree)}; got"
            f" {prefix!r} ({type(prefix).__name__}). Pass one value for all leaves, or"
            " a tree with the same keys and lengths."
        ) from error
    return values


def is_constant(leaf: object) -> bool:
    """True if a leaf is a constant of the compiled program: neither an array nor a
    float, because a float may change from call to call.
    """
    may_change: Any = jax.Array | np.ndarray | np.generic | float | complex
    return not (isinstance(leaf, may_change) or hasattr(leaf, "__jax_array__"))


def axis_of(path: str, leaf: Array, axis: Any) -> Axis:
    if axis is None:
        return None
    is_one_key = is_key(leaf) and np.shape(leaf) == ()
    if (axis == KEY or is_one_key) and not is_constant(leaf):
        return KEY
    rank = np.ndim(leaf)
    if not -rank <= axis < rank:
        raise ArgumentValueError(
            f"{path}: expected an array with an axis {axis} for its items; got a"
            f" {type(leaf).__name__} of shape {np.shape(leaf)}. If every micro-batch"
            " needs the whole value, pass it by position, with axes=None. If it is a"
            " list with one number per item, convert the list to an array."
        )
    return int(axis % rank)
