"""The batch that `gradaccum.verify` splits: its arrays, their batch axes, and the
arguments for each micro-batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

from gradaccum.errors import require_weight
from gradaccum.nests import leaves_of, spread, with_leaves
from gradaccum.splitting import require_item_weights, require_one_size

Items: TypeAlias = Sequence[int]
"""Indices along the batch axis, in the order of the items in a micro-batch."""
KEY = "key"
"""Used instead of an axis for a random key, which each micro-batch gets whole."""


class Batch:
    """The arguments that the loss function gets after the model.

    Args:
        arguments: nests of arrays.
        axes: a prefix nest of `arguments` with the batch axis of each array, or None
            for an array that each micro-batch gets whole. Values that are not arrays
            are always passed whole.
        is_array: returns True if a leaf is an array.
        take: ``take(array, axis, items)`` returns the slices of `array` that belong to
            `items`, or the whole array if `axis` is None.
        weight: None, ``weight(*micro_batch)``, or one number per item.
    """

    def __init__(
        self,
        arguments: tuple[Any, ...],
        axes: Any,
        is_array: Callable[[object], bool],
        take: Callable[[Any, int | None, Items], Any],
        weight: Any = None,
    ) -> None:
        self._arguments = arguments
        self._leaves = leaves_of(arguments, "batch")
        self._is_array = is_array
        self._take = take
        self._axes: list[int | None] = []
        for leaf, axis in zip(
            self._leaves, spread(axes, arguments, "axes"), strict=True
        ):
            has_axes = is_array(leaf.value) and bool(leaf.value.shape)  # type: ignore[attr-defined]
            is_split = has_axes and axis not in (None, KEY)
            self._axes.append(axis if is_split else None)  # type: ignore[arg-type]
        self.items = require_one_size(
            (path, array.shape[axis]) for path, array, axis in self._split()
        )
        self.terms = max(math.prod(array.shape) for _, array, _ in self._split())
        """The approximate number of terms that are added up for one element of a
        gradient.
        """
        self._weight = weight
        if weight is not None and not callable(weight):
            self._weight = require_item_weights(weight, self.items)

    def part(self, items: Items) -> tuple[Any, ...]:
        """Return the arguments that the loss function gets for some of the items."""
        values = []
        for leaf, axis in zip(self._leaves, self._axes, strict=True):
            value = leaf.value
            if self._is_array(value):
                value = self._take(value, axis, items)
            values.append(value)
        arguments: Any = with_leaves(self._arguments, iter(values))
        return tuple(arguments)

    def arrays(self, items: Items) -> list[tuple[str, Any]]:
        """Return, for each array that is split, its path and its slices for `items`."""
        return [
            (path, self._take(array, axis, items))
            for path, array, axis in self._split()
        ]

    def weight(self, items: Items) -> float:
        """Return the weight of the micro-batch of these items."""
        if self._weight is None:
            return float(len(items))
        if callable(self._weight):
            return require_weight(self._weight(*self.part(items)))
        return math.fsum(self._weight[item] for item in items)

    def _split(self) -> Iterator[tuple[str, Any, int]]:
        for leaf, axis in zip(self._leaves, self._axes, strict=True):
            if axis is not None:
                yield leaf.path, leaf.value, axis
