"""The batch that `gradaccum.verify` splits: its arrays, their batch axes, and the
arguments for each micro-batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from gradaccum.errors import require_weight
from gradaccum.nests import leaves_of, spread, with_leaves
from gradaccum.splitting import LargeBatch

Items: TypeAlias = Sequence[int]
"""The items of a micro-batch, in order, as indices along the batch axis."""
KEY = "key"
"""Marks an argument as a random key, which has no batch axis. Each micro-batch gets the
whole key.
"""


class Batch(LargeBatch):
    """The arguments that follow the model in a call of the loss function,
    ``loss_fn(model, *arguments)``. The arguments can be split in any way: a micro-batch
    may contain any of the items, in any order.

    Args:
        arguments: nests (nested structures of tuples, lists and dicts) of arrays.
        axes: the batch axis of each array: one value for all arrays, or a nest with the
            same outer levels as `arguments`. If the value is None or `KEY`, every
            micro-batch gets the whole array. Arrays without axes and values that are
            not arrays are never split.
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
        self._is_array = is_array
        self._take = take
        values: list[Any] = [leaf.value for leaf in leaves_of(arguments)]
        axes_of_arrays = (
            axis if is_array(value) and value.shape and axis != KEY else None
            for value, axis in zip(values, spread(axes, arguments, "axes"), strict=True)
        )
        super().__init__(arguments, with_leaves(arguments, axes_of_arrays), weight)
        self._axes_of_leaves = list(zip(self.leaves, self._axes, strict=True))
        self._split: list[tuple[str, Any, int]] = [
            (leaf.path, leaf.value, axis)
            for leaf, axis in self._axes_of_leaves
            if axis is not None
        ]
        self.terms = max(math.prod(array.shape) for _, array, _ in self._split)
        """The approximate number of terms that are added up for one element of a
        gradient.
        """

    def part(self, items: Items) -> tuple[Any, ...]:
        """Return the arguments that the loss function gets for some of the items."""
        values = (
            self._take(leaf.value, axis, items)
            if self._is_array(leaf.value)
            else leaf.value
            for leaf, axis in self._axes_of_leaves
        )
        arguments: Any = with_leaves(self._arguments, values)
        return tuple(arguments)

    def arrays(self, items: Items) -> list[tuple[str, Any]]:
        """Return the arrays of the micro-batch that consists of `items`, each with its
        path. Arrays that are passed whole are left out.
        """
        return [
            (path, self._take(array, axis, items)) for path, array, axis in self._split
        ]

    def weight(self, items: Items) -> float:
        """Return the weight of the micro-batch that consists of `items`."""
        if callable(self._weight):
            return require_weight(self._weight(*self.part(items)))
        weights = self._weight or [1.0] * self.items
        return math.fsum(weights[item] for item in items)
