"""The batch: its leaves, their batch axes, the items of one micro-batch, and columns of
plain numbers for the core to read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradaccum.kit import (
    Column,
    Leaf,
    is_column,
    leaves_of,
    lists_of_one_kind,
    require_one_size,
    spread,
    with_leaves,
)
from gradaccum_torch.large_batch.batch import axis_of, length_of

READABLE = 100_000
"""Numbers that a leaf may have to be looked at as counts or labels: an image is none.
"""


class Batch:
    """The arguments of the loss function after the model."""

    def __init__(self, batch: tuple[Any, ...], axes: Any) -> None:
        self._batch = batch
        lists = lists_of_one_kind(batch, axes)
        self._leaves = leaves_of(self._batch, "batch")
        wanted = spread(axes, self._batch, "axes")
        self._axes = [
            axis_of(leaf, axis) for leaf, axis in zip(self._leaves, wanted, strict=True)
        ]
        lengths = [
            (leaf.path, length_of(leaf.value, axis)) for leaf, axis in self._split()
        ]
        self.items = require_one_size(lengths, lists)
        self.terms = max(
            [
                self.items,
                *(
                    leaf.value.numel()
                    for leaf in self._leaves
                    if isinstance(leaf.value, Tensor)
                ),
            ]
        )
        """About how many numbers are added up into one of a gradient."""

    def part(
        self,
        items: Sequence[int],
        epsilon: float = 0.0,
        perturbation: int | None = None,
    ) -> tuple[Any, ...]:
        """Return the arguments for `items`, copied, so that a loss that writes into its
        inputs does not reach the user's.
        """
        made = [
            self._chosen(leaf.value, axis, items)
            for leaf, axis in zip(self._leaves, self._axes, strict=True)
        ]
        if perturbation is not None:
            made = [
                perturbed(value, epsilon, perturbation)
                if isinstance(value, Tensor)
                else value
                for value in made
            ]
        whole: Any = with_leaves(self._batch, iter(made))
        return tuple(whole)

    def columns(self) -> list[Column]:
        return [
            _column(leaf, axis, self.items)
            for leaf, axis in self._split()
            if _is_readable(leaf.value)
        ]

    def _split(self) -> list[tuple[Leaf, int]]:
        return [
            (leaf, axis)
            for leaf, axis in zip(self._leaves, self._axes, strict=True)
            if axis is not None
        ]

    @staticmethod
    def _chosen(value: Any, axis: int | None, items: Sequence[int]) -> Any:
        if isinstance(value, Tensor):
            places = torch.tensor(list(items), device=value.device)
            if axis is None:
                return value.detach().clone()
            return value.detach().index_select(axis, places)
        if axis is None:
            return value
        if is_column(value):
            return type(value)(value[item] for item in items)
        return value.take(list(items), axis)


def _is_readable(value: Any) -> bool:
    if is_column(value):
        return all(isinstance(entry, bool | int | float) for entry in value)
    if isinstance(value, Tensor):
        return value.numel() <= READABLE and not value.is_complex()
    return bool(value.size <= READABLE and value.dtype.kind in "biuf")


def _column(leaf: Leaf, axis: int, items: int) -> Column:
    value: Any = leaf.value
    if is_column(value):
        return Column(
            leaf.path,
            [[entry] for entry in value],
            not any(isinstance(entry, float) for entry in value),
            False,
        )
    tensor = value.detach() if isinstance(value, Tensor) else torch.as_tensor(value)
    rows = tensor.movedim(axis, 0).reshape(items, -1).tolist()
    return Column(
        leaf.path, rows, not tensor.is_floating_point(), tensor.ndim == 2 and axis == 0
    )


# The rows of a tensor that belong to an item.
#
# Inside a model the batch axis is not marked: it may stand second, or be flattened with
# the positions of a sequence, item after item. It is found by comparing the shapes of
# one tensor in the large batch and in a part of it.


class Axis(NamedTuple):
    """The axis of a tensor's items."""

    dim: int
    block: int
    """How many consecutive rows each item has along `dim`."""


class NoAxis(Exception):
    """The shapes differ in another way than by the number of items."""


def axis_between(
    whole: Sequence[int], part: Sequence[int], items: int, fewer: int
) -> Axis | None:
    """Return the axis of the items of a tensor, of shape `whole` with all items and
    `part` with `fewer`; None for equal shapes.

    Raises:
        NoAxis: the shapes differ otherwise than in proportion to the items.
    """
    differing = [
        dim for dim, (a, b) in enumerate(zip(whole, part, strict=False)) if a != b
    ]
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
    if axis is None:
        return tensor
    places = [item * axis.block + row for item in items for row in range(axis.block)]
    return tensor.index_select(axis.dim, torch.tensor(places, device=tensor.device))


def perturbed(
    tensor: Tensor, epsilon: float, number: int, *, integers: bool = False
) -> Tensor:
    """Return a copy, each number times 1 + epsilon or 1 - epsilon, without the user's
    random state; `integers`: those too.
    """
    if not tensor.is_floating_point():
        return tensor
    own = torch.Generator().manual_seed(1000003 * number + tensor.numel())
    signs = (torch.randint(0, 2, tensor.shape, generator=own) * 2 - 1).to(tensor.device)
    moved = (tensor.double() * (1 + epsilon * signs.double())).to(tensor.dtype)
    return moved if integers else torch.where(tensor == tensor.round(), tensor, moved)
