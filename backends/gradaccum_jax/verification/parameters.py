"""The parameters of a loss as flat arrays with names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gradaccum import ArgumentTypeError
from gradaccum.kit import explain
from gradaccum_jax.trees import unique
from gradaccum_jax.types import Array, Params
from gradaccum_jax.verification.batch import is_float, is_key


class Parameters(NamedTuple):
    """The leaves of a tree of parameters, those that can be differentiated by first among equals."""

    leaves: tuple[object, ...]
    """All of them, functions and texts too, which some libraries keep beside arrays."""
    structure: jax.tree_util.PyTreeDef
    arrays: tuple[int, ...]
    """The places of arrays."""
    names: dict[str, int]
    """The floating ones: by path, the place among `arrays`."""

    @property
    def values(self) -> list[Array]:
        """The arrays."""
        return [self.leaves[place] for place in self.arrays]

    def tree(self, values: Sequence[Array]) -> Params:
        """The tree with other arrays."""
        leaves = list(self.leaves)
        for place, value in zip(self.arrays, values, strict=True):
            leaves[place] = value
        return jax.tree.unflatten(self.structure, leaves)


def make_parameters(params: Params) -> Parameters:
    """The parameters, checked.

    Raises:
        ArgumentTypeError: there is no floating array among them.
    """
    flat, structure = jax.tree_util.tree_flatten_with_path(params)
    leaves = tuple(np.asarray(jnp.asarray(leaf)) if is_array(leaf) and not is_key(leaf) else leaf for _, leaf in flat)
    arrays = tuple(place for place, leaf in enumerate(leaves) if is_array(leaf))
    paths = unique(jax.tree_util.keystr(path) or "params" for path, _ in flat)
    names = {paths[place]: number for number, place in enumerate(arrays) if is_float(leaves[place])}
    if not names:
        fix = "Pass the tree that the loss is differentiated by; for a flax module its variables['params']."
        found = f"{type(params).__name__} with {len(arrays)} arrays"
        raise explain(ArgumentTypeError, "params", expected="a tree with a floating array in it", found=found, fix=fix)
    return Parameters(leaves, structure, arrays, names)


def is_array(leaf: object) -> bool:
    """Whether `leaf` is an array or a number."""
    return isinstance(leaf, (jax.Array, np.ndarray, np.generic, float, int, complex))
