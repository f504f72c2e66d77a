"""Many small arrays as a few larger ones, for a pass that only reads them.

Each array of a model is an operation of its own in the program. XLA compiles each, and where arrays are small, calling the compiled code
takes longer than running it. A copy of the small ones, side by side in one array, makes one operation of hundreds.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import TypeVar

import jax.numpy as jnp

from gradaccum_jax.devices import on_explicit_mesh
from gradaccum_jax.types import Array, Axes, Leaves
from gradaccum_jax.varying import axes_of

Kind = TypeVar("Kind", bound=Hashable)
SMALL = 2**14
"""Elements of an array at most: 16 us of one core, at 4 GB/s."""
LONGEST = 2**19
"""Elements of a pack at most. A longer list of arrays takes longer to compile; fewer packs, fewer operations."""
MULTIPLE = 16
"""A pack has a multiple of so many elements; see `gradaccum_jax.norm.COLUMNS`."""


def is_small(leaf: Array) -> bool:
    """Whether `leaf` may be packed. One whose type says how it is sharded may not: JAX would gather it."""
    return leaf.size <= SMALL and not on_explicit_mesh(leaf)


def packed(leaves: Leaves, kinds: list[Kind]) -> tuple[Leaves, list[Kind]]:
    """The arrays with the small ones in packs, which end in zeros, and the kind of each.

    Args:
        leaves: arrays of one dtype.
        kinds: one for each array; a pack holds one kind.
    """
    packs: dict[tuple[Kind, Axes], list[Leaves]] = {}
    whole: list[tuple[Array, Kind]] = []
    for leaf, kind in zip(leaves, kinds, strict=True):
        if is_small(leaf):
            _put(packs.setdefault((kind, axes_of(leaf)), []), leaf)
        else:
            whole.append((leaf, kind))
    whole += [(_pack(together), key[0]) for key, several in packs.items() for together in several]
    return [leaf for leaf, _ in whole], [kind for _, kind in whole]


def _put(packs: list[Leaves], leaf: Array) -> None:
    """Into the last pack, or a new one where that is full."""
    if not packs or sum(other.size for other in packs[-1]) + leaf.size > LONGEST:
        packs.append([])
    packs[-1].append(leaf)


def _pack(leaves: Leaves) -> Array:
    if len(leaves) == 1:
        return leaves[0]
    rest = -sum(leaf.size for leaf in leaves) % MULTIPLE
    return jnp.concatenate([*(leaf.reshape(-1) for leaf in leaves), jnp.zeros(rest, leaves[0].dtype)])
