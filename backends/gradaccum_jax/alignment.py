"""The user's gradients in the order of the sums, and the gradients that are refused.

Trees of one structure are aligned leaf by leaf; other trees by path, since containers may differ in type. A pytree node may report one key
for several children; then a path names several leaves, and only the same structure is taken.
"""

from __future__ import annotations

from collections import Counter
from typing import NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from gradaccum import GradientError
from gradaccum.kit import explain
from gradaccum_jax.dtypes import takes_part, wider
from gradaccum_jax.trees import is_none
from gradaccum_jax.types import Array, DType, Gradients, Leaves, Tree

FIX = "Differentiate with respect to the parameters that were given to tx.init."
Named = list[tuple[str, Array]]


def align(gradients: Tree, accumulator: Tree, *, any_float: bool) -> Gradients:
    """The gradients in the order of the accumulator's leaves; None for a parameter without one.

    A None may also stand for a whole subtree. Containers may differ in type as long as the paths agree.

    Args:
        gradients: the tree the user gave.
        accumulator: the tree of sums.
        any_float: let through dtypes wider than the accumulator's, because the user chose its dtype.

    Raises:
        GradientError: the structure, a shape or a dtype differs; names the path of the leaf.
    """
    held, structure = _named(accumulator)
    given, other = _named(gradients)
    found = [leaf for _, leaf in given] if structure == other else _by_path(held, given)
    for (name, leaf), gradient in zip(held, found, strict=True):
        _check_leaf(name, gradient, leaf, any_float)
    return [gradient for (_, leaf), gradient in zip(held, found, strict=True) if leaf is not None]


def _named(tree: Tree) -> tuple[Named, Tree]:
    """The leaves by path, None and float0 as None, and the structure."""
    flat, structure = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_none)
    return [(jax.tree_util.keystr(path), _array(leaf)) for path, leaf in flat], structure


def _by_path(held: Named, given: Named) -> Leaves:
    found = dict(given)
    absent = tuple(path for path, leaf in found.items() if leaf is None)
    names = [name for name, _ in held]
    for name in (*_repeated(names), *_repeated([path for path, _ in given])):
        _refuse(name, "gradients in the structure of the parameters, as several leaves have this path", "another structure")
    for name, leaf in held:
        if leaf is not None and name not in found and not any(_is_under(name, path) for path in absent):
            _refuse(name, "a gradient (None if the parameter took no part)", "nothing at all")
    for name in found.keys() - set(names):
        if found[name] is not None:
            _refuse(name, "no gradient, as the parameters have no such leaf", f"one of shape {np.shape(found[name])}")
    return [found.get(name) for name in names]


def _repeated(names: list[str]) -> list[str]:
    return [name for name, count in Counter(names).items() if count > 1]


def _is_under(name: str, path: str) -> bool:
    return name.startswith(path) and name[len(path)] in "[."


def _check_leaf(name: str, gradient: Array, held: Array, any_float: bool) -> None:
    if gradient is None:
        return
    if held is None:
        _refuse(name, "no gradient, as the parameters have no such leaf", f"one of shape {np.shape(gradient)}")
    if np.shape(gradient) != held.shape:
        _refuse(name, f"a gradient of shape {held.shape}", f"one of shape {np.shape(gradient)}")
    try:
        dtype = jnp.result_type(gradient)
    except TypeError:
        _refuse(name, "an array", f"a {type(gradient).__name__}")
    _check_dtype(name, dtype, held, any_float)


def _check_dtype(name: str, dtype: DType, held: Array, any_float: bool) -> None:
    if not takes_part(held):
        fix = "Give None or float0, as jax.grad does; train it as a float."
        _refuse(name, f"no gradient, as a parameter of dtype {held.dtype} takes no part", f"one of dtype {dtype}", fix)
    if not jnp.issubdtype(dtype, jnp.inexact):
        _refuse(name, f"a gradient of dtype {held.dtype}", f"one of dtype {dtype}")
    same_kind = jnp.issubdtype(dtype, jnp.complexfloating) == jnp.issubdtype(held.dtype, jnp.complexfloating)
    if not (any_float and same_kind) and wider(dtype, held.dtype) != held.dtype:
        _refuse(name, f"a gradient of a dtype that {held.dtype} holds", f"one of dtype {dtype}")


def _array(gradient: Array) -> Array:
    """`gradient`; None for a float0, which is JAX's gradient of an integer parameter."""
    return None if getattr(gradient, "dtype", None) == jax.dtypes.float0 else gradient


def _refuse(name: str, expected: str, found: str, fix: str = FIX) -> NoReturn:
    raise explain(GradientError, f"grads{name}", expected=expected, found=found, fix=fix)
