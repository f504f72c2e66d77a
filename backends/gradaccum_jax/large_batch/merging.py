"""The other outputs of a loss function (aux) over all micro-batches: merged in the loop's carry, or stacked as rows.

The arithmetic is `gradaccum.nests`'s. What JAX adds: a loop's carry has one type from the start, so a maximum starts from the neutral
element, and a micro-batch of weight 0 is left out of a weighted mean by select, because 0 x NaN is NaN.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from gradaccum import ArgumentValueError
from gradaccum.kit import Scalar, concatenate_error, explain, finished, merged, require_kind, share
from gradaccum_jax.dtypes import takes_part
from gradaccum_jax.large_batch.batch import spread_over
from gradaccum_jax.types import Array, DType, Tree

ROWS = "concatenate"
MEANS = ("mean", "weighted_mean")
EXTREMES = ("max", "min")


class JaxOps:
    """`gradaccum.kit.MergingOps` for JAX."""

    def maximum(self, a: Array, b: Array) -> Array:
        """Element by element; NaN where either is."""
        return jnp.maximum(a, b)

    def minimum(self, a: Array, b: Array) -> Array:
        """Element by element; NaN where either is."""
        return jnp.minimum(a, b)

    def widened(self, value: Array) -> Array:
        """float32 for half precision, JAX's default integer for booleans, else as it is."""
        return value.astype(_sum_dtype(value.dtype))


OPS = JaxOps()


class Merging(NamedTuple):
    """How one aux merges: known from its shape, before anything runs."""

    kinds: tuple[str, ...]
    """One of `gradaccum.kit.KINDS` for each leaf."""
    like: tuple[Any, ...]
    """Shape and dtype of each leaf in a micro-batch."""
    structure: Any
    """The tree that the leaves are those of."""

    def start(self) -> list[Array]:
        """The merged leaves before the first micro-batch, without those that are rows."""
        return [_neutral(kind, leaf) for kind, leaf in zip(self.kinds, self.like, strict=True) if kind != ROWS]

    def add(self, held: list[Array], aux: Tree, items: Scalar, weight: Scalar) -> tuple[list[Array], list[Array]]:
        """One micro-batch more: the merged leaves, and its rows.

        Args:
            held: the merged leaves so far.
            aux: the micro-batch's.
            items: its number of items, a real number; None where nobody knows and no leaf asks.
            weight: its weight, a real scalar.
        """
        leaves = [jnp.asarray(leaf) for leaf in jax.tree.leaves(aux)]
        given = [(kind, leaf) for kind, leaf in zip(self.kinds, leaves, strict=True) if kind != ROWS]
        added = [merged(kind, old, _share(kind, leaf, items, weight), OPS) for old, (kind, leaf) in zip(held, given, strict=True)]
        return added, [leaf for kind, leaf in zip(self.kinds, leaves, strict=True) if kind == ROWS]

    def over_devices(self, held: list[Array], axes: tuple[str, ...]) -> list[Array]:
        """The maxima and minima of all devices; sums are reduced with the gradients."""
        reduce: dict[str, Any] = {"max": lax.pmax, "min": lax.pmin}
        kinds = [kind for kind in self.kinds if kind != ROWS]
        return [reduce[kind](leaf, axes) if kind in reduce else leaf for kind, leaf in zip(kinds, held, strict=True)]

    def is_sum(self) -> list[bool]:
        """For each merged leaf whether devices add theirs up."""
        return [kind not in EXTREMES for kind in self.kinds if kind != ROWS]

    def finish(self, held: list[Array], rows: list[Array], items: Scalar, weight: Scalar) -> Tree:
        """The aux of the large batch, floats in the dtypes that the loss function returned.

        Args:
            held: the merged leaves of all micro-batches.
            rows: the rows of all micro-batches, in order.
            items: the number of items in the batch, or None.
            weight: its weight; 1 if that is 0.
        """
        merged_leaves, row_leaves = iter(held), iter(rows)
        made = [
            next(row_leaves) if kind == ROWS else _as_given(finished(kind, next(merged_leaves), items, weight), kind, leaf.dtype)
            for kind, leaf in zip(self.kinds, self.like, strict=True)
        ]
        return jax.tree.unflatten(self.structure, made)

    @property
    def counts_items(self) -> bool:
        """Whether some leaf asks for the number of items."""
        return "mean" in self.kinds


def make_merging(declared: Tree, aux: Tree) -> Merging:
    """The merging of `aux`, a tree of shapes and dtypes, by the user's declaration, a prefix of it.

    Raises:
        ArgumentValueError: a kind is unknown, the declaration has another structure, a leaf without an axis is to be concatenated, or one
            that is no number is to be merged otherwise.
    """
    kinds, held = spread_over(declared, aux, "aux"), jax.tree_util.tree_flatten_with_path(aux)
    for kind, (path, leaf) in zip(kinds, held[0], strict=True):
        require_kind(kind)
        _require_mergeable(kind, f"aux{jax.tree_util.keystr(path)}", leaf)
    return Merging(tuple(kinds), tuple(leaf for _, leaf in held[0]), held[1])


def check_declared(declared: Tree) -> None:
    """Refuse an unknown kind before anything is traced.

    Raises:
        ArgumentValueError: it is none of `gradaccum.kit.KINDS`.
    """
    for kind in jax.tree.leaves(declared):
        require_kind(kind)


def _require_mergeable(kind: str, path: str, leaf: Array) -> None:
    if kind == ROWS and leaf.shape == ():
        raise concatenate_error(path, "a scalar")
    if kind != ROWS and jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
        fix = "Declare 'concatenate' for this leaf, or leave it out of aux."
        raise explain(ArgumentValueError, path, expected=f"numbers to merge by {kind!r}", found=f"dtype {leaf.dtype}", fix=fix)


def _share(kind: str, leaf: Array, items: Scalar, weight: Scalar) -> Array:
    if kind not in MEANS:
        return share(kind, leaf, items, weight, OPS)
    by = items if kind == "mean" else weight
    given = share(kind, leaf if takes_part(leaf) else leaf.astype(_float()), items, weight, OPS)
    return jnp.where(by == 0, jnp.zeros_like(given), given).astype(_mean_dtype(leaf.dtype))


def _neutral(kind: str, like: Any) -> Array:
    """What a merge starts from: 0, or the number that every other one is above or below."""
    if kind in MEANS:
        return jnp.zeros(like.shape, _mean_dtype(like.dtype))
    if kind == "sum":
        return jnp.zeros(like.shape, _sum_dtype(like.dtype))
    return jnp.full(like.shape, _extreme(kind, like.dtype), like.dtype)


def _extreme(kind: str, dtype: DType) -> Any:
    if jnp.issubdtype(dtype, jnp.bool_):
        return kind == "min"
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.iinfo(dtype).min if kind == "max" else jnp.iinfo(dtype).max
    return -np.inf if kind == "max" else np.inf


def _sum_dtype(dtype: DType) -> DType:
    if jnp.issubdtype(dtype, jnp.bool_):
        return jax.dtypes.canonicalize_dtype(jnp.int64)
    return jnp.dtype("float32") if jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4 else dtype


def _mean_dtype(dtype: DType) -> DType:
    return _sum_dtype(dtype) if jnp.issubdtype(dtype, jnp.inexact) else _float()


def _float() -> DType:
    return jax.dtypes.canonicalize_dtype(jnp.float64)


def _as_given(leaf: Array, kind: str, dtype: DType) -> Array:
    return leaf.astype(dtype) if jnp.issubdtype(dtype, jnp.inexact) and kind not in EXTREMES else leaf
