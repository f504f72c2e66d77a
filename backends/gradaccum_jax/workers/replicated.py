"""A value that is the same on all devices although its type says that it may differ.

At a window's end the reduced sum takes the place of each device's own sum, in the same buffer. The loop that does it has one type for both:
that of values which vary. The numbers that are made of the reduced sum are the same on all devices, and only this package knows. Without
a word for that, the updates would need a second buffer of the model's size, or another collective.

JAX has no such word. Here it is: a primitive that changes the type and nothing else.
"""

from __future__ import annotations

from typing import Any, TypeVar, cast

import jax
from jax.extend import core
from jax.interpreters import batching, mlir

from gradaccum_jax.types import Array
from gradaccum_jax.varying import axes_of

T = TypeVar("T")

_replicated: Any = core.Primitive("replicated")


def replicated(tree: T, axes: tuple[str, ...], *, known: bool = True, asked: str = "") -> T:
    """`tree`, none of its arrays varying along `axes` by its type: the caller knows that they are the same along these.

    Args:
        tree: of arrays. It has no derivative.
        axes: names of mesh axes; without any, `tree` is returned as it is.
        known: the caller knows; otherwise `origins.differing` finds it out.
        asked: the name by which `origins.differing` refuses the arrays if they differ.
    """

    def cast_type(leaf: Array) -> Array:
        varying = tuple(sorted(axes_of(leaf) & frozenset(axes)))
        asks = asked and isinstance(leaf, jax.Array)  # of a type that does not vary, too: it may have come from a branch
        return _replicated.bind(leaf, axes=varying, known=known, asked=asked) if varying or asks else leaf

    return cast(T, jax.tree.map(cast_type, tree)) if axes else tree


def _type(operand: Any, *, axes: tuple[str, ...], **_: Any) -> Any:
    if hasattr(operand, "vma"):  # JAX 0.7; the type of JAX 0.10 knows more ways than one to differ
        return operand.update(vma=operand.vma - frozenset(axes))
    return operand.update(manual_axis_type=operand.mat.update(varying=operand.mat.varying - frozenset(axes)))


def _batched(operands: Any, dimensions: Any, **params: Any) -> Any:
    return _replicated.bind(*operands, **params), dimensions[0]


_replicated.def_abstract_eval(_type)
_replicated.def_impl(lambda operand, **_: operand)
mlir.register_lowering(_replicated, lambda _, operand, **params: [operand])
batching.primitive_batchers[_replicated] = _batched
