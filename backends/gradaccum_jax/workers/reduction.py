"""One sum over all devices for many arrays.

All of it is one `jax.lax.psum`, of which XLA makes one collective; but on the CPU only from JAX 0.10 on. So small arrays of one type
travel as one array (shards and copies have two types), and large ones by themselves: to pack these would cost memory. XLA reduces into new
arrays on the CPU, so that a window's end wants room for one more sum there.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from gradaccum.kit import Scalar
from gradaccum_jax.devices import explicitly_sharded
from gradaccum_jax.dtypes import takes_part
from gradaccum_jax.types import Array, Leaves, Tree
from gradaccum_jax.varying import axes_of
from gradaccum_jax.workers.replicated import replicated

LARGE_BYTES = 2**20
"""From here on an array travels by itself, in place."""


class Window(NamedTuple):
    """What the devices add up at a window's end."""

    accumulator: Tree
    """The tree of sums."""
    weight: Scalar
    overflow: Scalar
    """bool; added up: one of them is True."""
    loss: Scalar
    """The sum of the losses."""
    firsts: tuple[Scalar, ...]
    """What `knowledge.addends` says of the first micro-batches."""


def all_reduce(own: Window, axes: tuple[str, ...]) -> Window:
    """The window of all devices along `axes`, from each device's `own`; the same on all of them."""
    leaves, structure = jax.tree.flatten(own.accumulator)
    moving = [leaf for leaf in leaves if takes_part(leaf)]  # the sum of an integer parameter is 0 on every device
    numbers = [own.weight, own.overflow.astype(own.weight.dtype), own.loss, *own.firsts]
    added = _added_up([*moving, *numbers], axes)
    sums, (weight, overflows, loss, *firsts) = added[: len(moving)], added[len(moving) :]
    held = iter(sums)
    whole = [next(held) if takes_part(leaf) else replicated(leaf, axes) for leaf in leaves]
    return Window(jax.tree.unflatten(structure, whole), weight, overflows > 0, loss, tuple(firsts))


def _added_up(leaves: Leaves, axes: tuple[str, ...]) -> Leaves:
    packs: dict[Any, list[int]] = {}
    for index, leaf in enumerate(leaves):
        alone = leaf.nbytes >= LARGE_BYTES or explicitly_sharded(leaf)
        packs.setdefault(index if alone else (leaf.dtype, axes_of(leaf)), []).append(index)
    sums = lax.psum([_packed([leaves[index] for index in pack]) for pack in packs.values()], axes)  # type: ignore[no-untyped-call]
    made = list(leaves)
    for pack, total in zip(packs.values(), sums, strict=True):
        for index, part in zip(pack, _unpacked(total, [leaves[index] for index in pack]), strict=True):
            made[index] = part
    return made


def _packed(leaves: Leaves) -> Array:
    return leaves[0] if len(leaves) == 1 else jnp.concatenate([leaf.ravel() for leaf in leaves])


def _unpacked(total: Array, like: Leaves) -> Leaves:
    if len(like) == 1:
        return [total]
    parts, start = [], 0
    for leaf in like:
        parts.append(total[start : start + leaf.size].reshape(leaf.shape))
        start += leaf.size
    return parts
