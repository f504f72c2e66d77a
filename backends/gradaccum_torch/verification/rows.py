"""Which numbers of a tensor belong to which items.

Inside a model the batch axis is not marked: it may stand second, or be flattened with the positions of a sequence, item after item. It is
found by comparing the shapes of one tensor in the large batch and in a part of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Axis(NamedTuple):
    """Where the items of a tensor are."""

    dim: int
    block: int
    """How many consecutive rows each item has along `dim`."""


class NoAxis(Exception):
    """The shapes differ in another way than by the number of items."""


def axis_between(whole: Sequence[int], part: Sequence[int], items: int, fewer: int) -> Axis | None:
    """The axis of the items of a tensor of shape `whole`, which has shape `part` with `fewer` items; None if the shapes are the same.

    Raises:
        NoAxis: they differ in several axes, or not in proportion to the items.
    """
    differing = [dim for dim, (a, b) in enumerate(zip(whole, part, strict=False)) if a != b]
    if not differing and len(whole) == len(part):
        return None
    if len(differing) != 1 or len(whole) != len(part):
        raise NoAxis
    (dim,) = differing
    block, rest = divmod(whole[dim], items)
    if rest or part[dim] != block * fewer:
        raise NoAxis
    return Axis(dim, block)


def rows(tensor: Tensor, axis: Axis | None, items: Sequence[int]) -> Tensor:
    """The numbers of `items`, in their order; all of them without an axis."""
    if axis is None:
        return tensor
    places = [item * axis.block + row for item in items for row in range(axis.block)]
    return tensor.index_select(axis.dim, torch.tensor(places, device=tensor.device))
