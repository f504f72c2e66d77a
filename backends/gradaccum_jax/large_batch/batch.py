"""A large batch and where its arrays are cut: every array along its own axis, at the same items.

The arrays are data of the compiled program; the axes, the cuts and plain values such as flags are constants of it. So the program is
compiled once for each shape of batch, however it is divided. JAX has trees of its own, to which users add classes; so nests are walked here
by `jax.tree`, and paths are spelled as `jax.tree_util.keystr` does, which agrees with `gradaccum.kit.leaves_of`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from gradaccum import ArgumentTypeError, ArgumentValueError
from gradaccum.kit import Cut, Scalar, explain, is_column, mark_lists, require_one_size
from gradaccum_jax.dtypes import is_key
from gradaccum_jax.trees import is_none
from gradaccum_jax.types import Array, Tree

KEY = "key"
"""In place of an axis: the leaf is a random key, and micro-batch number i gets ``jax.random.fold_in(key, i)``."""
Axis = int | str | None
"""A batch axis >= 0, None for what every micro-batch is given whole, or `KEY`."""
PLAIN = (str, bytes, bool, int, float, complex)
"""A leaf that is one plain value of Python has no items, and is given whole to each micro-batch."""
BY_ITEM = "stack them into arrays, or write split= a function"
"""What to do where the elements of a list are the items: XLA cuts arrays alone."""
_FIX = "Write an axis for arrays with items, None for what every micro-batch is given whole, or 'key' for a random key."


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["leaves", "item_weights"],
    meta_fields=["axes", "constants", "structure", "cuts", "lists"],
)
@dataclass(frozen=True)
class Batch:
    """The batch's arguments, and where they are cut."""

    leaves: list[Array]
    """The arrays, in JAX's order."""
    item_weights: Array
    """Real, shape (items,): each item's weight; or None."""
    axes: tuple[Axis, ...]
    """One for each of `leaves`."""
    constants: tuple[tuple[int, type, Any], ...]
    """Values that are no arrays, each with its place among all leaves: flags, texts, functions, Python ints. And with its type, since a
    compiled program is found again by them, and 1 equals True."""
    structure: Any
    """The tree that arrays and constants are the leaves of."""
    cuts: tuple[Cut, ...] = ()
    lists: tuple[tuple[str, int, str], ...] = ()
    """Path, length and brackets of each list that may be one of items; see `gradaccum.kit.mark_lists`."""

    def arguments(self, leaves: Sequence[Array]) -> tuple[Tree, ...]:
        """The arguments with `leaves` in place of the arrays."""
        held = list(leaves)
        for place, _, value in self.constants:
            held.insert(place, value)
        arguments: tuple[Tree, ...] = jax.tree.unflatten(self.structure, held)
        return arguments

    def taken(self, start: Scalar, size: int, index: Scalar) -> list[Array]:
        """The arrays of one micro-batch: `size` items from `start` on, both in items; `index` is its number among all of the batch."""
        return [take(leaf, axis, start, size, index) for leaf, axis in zip(self.leaves, self.axes, strict=True)]

    def sizes(self) -> list[tuple[str, int]]:
        """For each array that is cut its path and its number of items."""
        held = zip(self._paths(), self.leaves, self.axes, strict=True)
        return [(path, np.shape(leaf)[axis]) for path, leaf, axis in held if isinstance(axis, int)]

    @property
    def items(self) -> int:
        """The number of items.

        Raises:
            ArgumentValueError: two arrays have different numbers of them, none has any, or a list may be one of items.
        """
        return require_one_size(self.sizes(), self.lists, BY_ITEM)

    def _paths(self) -> list[str]:
        held = jax.tree_util.tree_flatten_with_path(self.arguments(self.leaves))[0]
        constant = {place for place, *_ in self.constants}
        return [f"batch{jax.tree_util.keystr(path)}" for place, (path, _) in enumerate(held) if place not in constant]


def make_batch(arguments: tuple[Tree, ...], axes: Tree) -> Batch:
    """The batch that the user gave, uncut.

    Args:
        arguments: what the loss function is given beside what it is differentiated by.
        axes: a prefix of that tuple: an axis for all leaves below, None or `KEY`. A scalar random key is `KEY` unless it is None. A plain
            value of Python has no items whatever its axis, but those of a list or tuple of such are one per item: they are refused.

    Raises:
        ArgumentValueError, ArgumentTypeError: `axes` is no such prefix, or a leaf has no such axis; names the leaf.
    """
    held, structure = jax.tree_util.tree_flatten_with_path(arguments)
    _require_dense(arguments, spread_over(axes, arguments, "axes"))
    spread = _whole_where_plain(arguments, spread_over(axes, arguments, "axes"))
    checked = [_axis_of(f"batch{jax.tree_util.keystr(path)}", leaf, axis) for (path, leaf), axis in zip(held, spread, strict=True)]
    constants = tuple((place, type(leaf), leaf) for place, (_, leaf) in enumerate(held) if is_constant(leaf))
    arrays = [(leaf, axis) for (_, leaf), axis in zip(held, checked, strict=True) if not is_constant(leaf)]
    lists = tuple(mark_lists(arguments, axes)[1])
    return Batch([leaf for leaf, _ in arrays], None, tuple(axis for _, axis in arrays), constants, structure, lists=lists)


def spread_over(prefix: Tree, tree: Tree, argument: str) -> list[Any]:
    """One value of `prefix` for each leaf of `tree`, as `gradaccum.kit.spread` does for the nests of the other frameworks.

    Raises:
        ArgumentValueError: `prefix` has another structure.
    """
    prefix = tuple(prefix) if type(prefix) is list and isinstance(tree, tuple) else prefix
    found: list[Any] = []
    try:
        jax.tree.map(lambda value, below: found.extend([value] * len(jax.tree.leaves(below))), prefix, tree, is_leaf=is_none)
    except ValueError as error:
        fix = "Give one value for all, or a tree whose keys and lengths are those of the tree that it is for."
        expected = f"a prefix of {jax.tree.structure(tree)}"
        raise explain(ArgumentValueError, argument, expected=expected, got=prefix, fix=fix) from error
    return found


def is_constant(leaf: object) -> bool:
    """Whether a leaf is a constant of the program: no array, and no float, which may change from call to call."""
    return not (isinstance(leaf, jax.Array | np.ndarray | np.generic | float | complex) or hasattr(leaf, "__jax_array__"))


def is_cut(axis: Axis) -> bool:
    """Whether a leaf with this axis has items."""
    return isinstance(axis, int)


def take(leaf: Array, axis: Axis, start: Scalar, size: int, index: Scalar) -> Array:
    """The part of `leaf` that micro-batch number `index` is given: `size` items from `start` on."""
    if axis == KEY:
        return jax.random.fold_in(leaf, index)
    return leaf if axis is None else lax.dynamic_slice_in_dim(jnp.asarray(leaf), start, size, int(axis))


def _whole_where_plain(arguments: tuple[Tree, ...], axes: list[Any]) -> list[Any]:
    """`axes` with None for the plain values. Those of a list keep theirs: given whole, it would broadcast against a micro-batch of one."""
    nodes = jax.tree.leaves(arguments, is_leaf=lambda node: node is not arguments and is_column(node))
    alone = [not is_column(node) for node in nodes for _ in jax.tree.leaves(node)]
    held = zip(jax.tree.leaves(arguments), axes, alone, strict=True)
    return [None if by_itself and _is_plain(leaf) and axis != KEY else axis for leaf, axis, by_itself in held]


def _require_dense(arguments: tuple[Tree, ...], axes: list[Any]) -> None:
    """Refuse a sparse array: JAX would cut the list of its entries."""
    module = sys.modules.get("jax.experimental.sparse")
    if module is None:
        return
    given = iter(axes)
    for path, node in jax.tree_util.tree_flatten_with_path(arguments, is_leaf=lambda node: isinstance(node, module.JAXSparse))[0]:
        split = [isinstance(next(given), int) for _ in jax.tree.leaves(node)]
        if any(split) and isinstance(node, module.JAXSparse):
            fix = "Write split= a function that cuts it, or .todense(); axes=None where every micro-batch is given it whole."
            found = f"a {type(node).__name__}"
            raise explain(ArgumentValueError, f"batch{jax.tree_util.keystr(path)}", expected="a dense array to split", found=found, fix=fix)


def _is_plain(leaf: object) -> bool:
    return isinstance(leaf, PLAIN) and not isinstance(leaf, np.generic)


def _axis_of(path: str, leaf: Array, axis: Any) -> Axis:
    """`axis` checked, and counted from the front."""
    if axis is None:
        return None
    if axis == KEY or (np.shape(leaf) == () and not is_constant(leaf) and is_key(leaf)):
        return _require_key(path, leaf)
    if isinstance(axis, bool) or not isinstance(axis, int):
        raise explain(ArgumentTypeError, "axes", expected="an int, None or 'key' for each leaf", got=axis, fix=_FIX)
    rank = 0 if is_constant(leaf) else np.ndim(leaf)
    if not -rank <= axis < rank:
        found = f"a {type(leaf).__name__}" if is_constant(leaf) else f"one of shape {np.shape(leaf)}"
        fix = "Write axes=None for this leaf if every micro-batch is given it whole; make a list with one number per item an array."
        raise explain(ArgumentValueError, path, expected=f"an array with an axis {axis} of items", found=found, fix=fix)
    if not isinstance(items := np.shape(leaf)[axis], int):
        expected, found = "a number of items that is known while JAX traces", f"the symbolic {items} of jax.export"
        fix = "Export for a fixed batch size; or export the step of one micro-batch, which takes a symbolic size, and loop outside."
        raise explain(ArgumentTypeError, path, expected=expected, found=found, fix=fix)
    return axis % rank


def _require_key(path: str, leaf: Array) -> str:
    """A typed scalar key, or the two 32-bit words of an old one."""
    if not is_constant(leaf) and (is_key(leaf) if np.shape(leaf) == () else jnp.result_type(leaf) == jnp.uint32 and np.ndim(leaf) == 1):
        return KEY
    fix = "Write axes='key' for jax.random.key(seed) alone; keys of single items have an axis."
    raise explain(ArgumentTypeError, path, expected="one random key", found=f"a {type(leaf).__name__} of shape {np.shape(leaf)}", fix=fix)
