"""The batch of a loss under comparison: leaves with items, random keys, and the
arguments of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gradaccum import ArgumentTypeError, ArgumentValueError
from gradaccum.kit import (
    explain,
    lists_of_one_kind,
    require_one_size,
    scalar_loss_error,
)
from gradaccum_jax.arrays import (
    KEY,
    Array,
    Axis,
    Params,
    Tree,
    axis_of,
    is_key,
    spread_over,
    unique,
)


class Batch(NamedTuple):
    """The leaves of a batch; all but keys are NumPy's arrays, which are cut without
    compiling.
    """

    leaves: tuple[Array, ...]
    axes: tuple[Axis, ...]
    """The axis of items, None for a leaf that is given whole, ``"key"`` for a random
    key.
    """
    paths: tuple[str, ...]
    """Each leaf as Python that reads it: ``batch[0]['ids']``."""
    structure: jax.tree_util.PyTreeDef
    items: int

    @property
    def keys(self) -> frozenset[int]:
        return frozenset(place for place, axis in enumerate(self.axes) if axis == KEY)

    @property
    def split(self) -> frozenset[int]:
        return frozenset(
            place for place, axis in enumerate(self.axes) if isinstance(axis, int)
        )

    @property
    def terms(self) -> int:
        return max(
            [self.items, *(int(leaf.size) for leaf in self.leaves if not is_key(leaf))]
        )

    def part(
        self,
        items: Sequence[int],
        number: int | None,
        leaves: Sequence[Array] | None = None,
    ) -> list[Array]:
        return [
            self._taken(leaf, axis, items, number)
            for leaf, axis in zip(leaves or self.leaves, self.axes, strict=True)
        ]

    def whole(self, leaves: Sequence[Array]) -> Tree:
        return jax.tree.unflatten(self.structure, leaves)

    def _taken(
        self, leaf: Array, axis: Axis, items: Sequence[int], number: int | None
    ) -> Array:
        if isinstance(axis, int):
            return leaf[(slice(None),) * axis + (np.asarray(items),)]
        return leaf if axis is None or number is None else folded(leaf, number)


def make_batch(batch: tuple[Tree, ...], axes: Tree) -> Batch:
    flat, structure = jax.tree_util.tree_flatten_with_path(batch)
    paths = tuple(f"batch{jax.tree_util.keystr(path)}" for path, _ in flat)
    leaves = tuple(
        leaf if is_key(leaf) else np.asarray(jnp.asarray(leaf)) for _, leaf in flat
    )
    found = tuple(
        axis_of(*each)
        for each in zip(paths, leaves, spread_over(axes, batch, "axes"), strict=True)
    )
    sizes = [
        (path, leaf.shape[axis])
        for leaf, axis, path in zip(leaves, found, paths, strict=True)
        if isinstance(axis, int)
    ]
    return Batch(
        leaves,
        found,
        paths,
        structure,
        require_one_size(sizes, lists_of_one_kind(batch, axes)),
    )


def is_float(leaf: Array) -> bool:
    return bool(
        jnp.issubdtype(
            leaf.dtype if hasattr(leaf, "dtype") else jnp.result_type(leaf), jnp.inexact
        )
    )


def folded(key: Array, number: int) -> Array:
    """Fold `number` into a key, or an array of them; a raw one of two numbers too."""
    if is_key(key) and key.ndim:
        return jax.vmap(lambda one: jax.random.fold_in(one, number))(
            key.reshape(-1)
        ).reshape(key.shape)
    return jax.random.fold_in(key, number)


def perturbed(
    leaf: Array, roundoff: float, rng: np.random.Generator, *, integers_too: bool
) -> Array:
    if not is_float(leaf):
        return leaf
    held = wide(leaf)
    moved = held * (1 + roundoff * rng.choice((-1.0, 1.0), held.shape))
    kept = np.zeros(held.shape, bool) if integers_too else held == np.round(held.real)
    return np.where(kept, held, moved).astype(leaf.dtype)


def loss_in(made: Tree, has_aux: bool) -> Tree:
    """Return the loss in what a loss function returned."""
    is_pair = isinstance(made, tuple) and len(made) == 2
    if is_pair is not has_aux:
        returned = "(loss, aux)" if has_aux else "a scalar loss"
        raise explain(
            ArgumentValueError,
            "loss_fn",
            expected=f"a function that returns {returned}",
            found=f"one that returns a {type(made).__name__}",
            fix="Leave has_aux out." if has_aux else "Write has_aux=True.",
        )
    return made[0] if has_aux else made


def require_scalar(loss: Tree) -> Array:
    if (
        not hasattr(loss, "dtype")
        or loss.shape != ()
        or not jnp.issubdtype(loss.dtype, jnp.floating)
    ):
        raise scalar_loss_error(
            f"shape {loss.shape}, {loss.dtype}"
            if hasattr(loss, "dtype")
            else type(loss).__name__
        )
    return loss


def wide(leaf: Array) -> Array:
    return np.asarray(leaf).astype(
        np.complex128 if jnp.iscomplexobj(leaf) else np.float64
    )


# The parameters of a loss as flat arrays with names.


class Parameters(NamedTuple):
    """The leaves of a tree of parameters."""

    leaves: tuple[object, ...]
    """All of them, functions and texts too."""
    structure: jax.tree_util.PyTreeDef
    arrays: tuple[int, ...]
    """The places of arrays."""
    names: dict[str, int]
    """The floating ones: by path, the place among `arrays`."""

    @property
    def values(self) -> list[Array]:
        return [self.leaves[place] for place in self.arrays]

    def tree(self, values: Sequence[Array]) -> Params:
        leaves = list(self.leaves)
        for place, value in zip(self.arrays, values, strict=True):
            leaves[place] = value
        return jax.tree.unflatten(self.structure, leaves)


def make_parameters(params: Params) -> Parameters:
    flat, structure = jax.tree_util.tree_flatten_with_path(params)
    leaves = tuple(
        np.asarray(jnp.asarray(leaf)) if is_array(leaf) and not is_key(leaf) else leaf
        for _, leaf in flat
    )
    arrays = tuple(place for place, leaf in enumerate(leaves) if is_array(leaf))
    paths = unique(jax.tree_util.keystr(path) or "params" for path, _ in flat)
    names = {
        paths[place]: number
        for number, place in enumerate(arrays)
        if is_float(leaves[place])
    }
    if not names:
        fix = (
            "Pass the tree that the loss is differentiated by; for a flax module its"
            " variables['params']."
        )
        found = f"{type(params).__name__} with {len(arrays)} arrays"
        raise explain(
            ArgumentTypeError,
            "params",
            expected="a tree with a floating array in it",
            found=found,
            fix=fix,
        )
    return Parameters(leaves, structure, arrays, names)


def is_array(leaf: object) -> bool:
    return isinstance(leaf, (jax.Array, np.ndarray, np.generic, float, int, complex))
