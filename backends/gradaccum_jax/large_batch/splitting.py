"""What the user says of a batch, and the micro-batches that come of it: by axes and cuts, or by a function of his own."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gradaccum import ArgumentTypeError, ArgumentValueError
from gradaccum.kit import Division, Scalar, divided, explain, make_division, require_items
from gradaccum_jax.large_batch.batch import Batch, is_cut, make_batch
from gradaccum_jax.large_batch.groups import Group, MicroBatch, groups_of
from gradaccum_jax.large_batch.weights import Weight, as_item_weights, concrete, traced_weights_error
from gradaccum_jax.types import Array, Tree

Parts = list[Batch]
"""The micro-batches of the user's own function, each a `Batch` without cuts."""
Source = Batch | Parts
"""A tree of arrays: what the compiled program is given of the batch."""


@dataclass(frozen=True, eq=False)
class Splitting:
    """The options that say how a batch is divided and weighted."""

    division: Division
    axes: Tree
    weight: Weight
    split: Callable[..., Iterable[Any]] | None
    devices: int = 1
    """How many devices the batch is spread over; each cuts its own part."""

    def source(self, arguments: tuple[Tree, ...], division: Division | None = None) -> Source:
        """The batch, cut.

        Args:
            arguments: the batch's.
            division: in place of the user's; its size is an int.

        Raises:
            ArgumentValueError, ArgumentTypeError: the batch cannot be divided so.
        """
        division = self.division if division is None else division
        if self.split is not None:
            return self._own_parts(arguments, division)
        batch = make_batch(arguments, self.axes)
        items = batch.items
        weights = None if self.weight is None or callable(self.weight) else as_item_weights(self.weight, items)
        known = concrete(self._item_weights(batch, items, weights)) if division.micro_batch_weight is not None else None
        return Batch(
            batch.leaves, weights, batch.axes, batch.constants, batch.structure, divided(division, _own(items, self.devices), known)
        )

    def _item_weights(self, batch: Batch, items: int, weights: Any) -> Any:
        """Per-item weights to pack by: the user's array, or his function asked about every item by itself."""
        if not callable(self.weight):
            return weights
        if any(isinstance(leaf, jax.core.Tracer) for leaf in batch.leaves):
            raise traced_weights_error()
        return as_item_weights(self._weigh_items(batch), items)

    @cached_property
    def _weigh_items(self) -> Callable[[Batch], Array]:
        weigh: Any = self.weight

        def each(batch: Batch) -> Array:
            return jax.vmap(lambda item: jnp.asarray(weigh(*batch.arguments(batch.taken(item, 1, item)))))(jnp.arange(batch.items))

        return jax.jit(each)

    def _own_parts(self, arguments: tuple[Tree, ...], division: Division) -> Parts:
        assert self.split is not None
        if self.weight is not None and not callable(self.weight):
            fix = "Write weight= a function of the micro-batch."
            raise explain(ArgumentTypeError, "weight", expected="a function beside split=", found="an array", fix=fix)
        made = self.split(*arguments) if division.steps is None else self.split(*arguments, steps=division.steps)
        parts = [part if type(part) is tuple else (part,) for part in made]
        require_items(len(parts))
        if division.steps is not None and len(parts) > division.steps:
            fix = "Let split return no more of them, or leave steps out."
            raise explain(ArgumentValueError, "split", expected=f"at most steps={division.steps} micro-batches", got=len(parts), fix=fix)
        return [_part(part, self.axes) for part in parts]


def make_splitting(steps: Any, micro_batch_size: Any, micro_batch_weight: Any, axes: Tree, weight: Weight, split: Any) -> Splitting:
    """The user's options, checked as far as they can be without a batch.

    Raises:
        ArgumentValueError, ArgumentTypeError: naming the option that is wrong.
    """
    if split is not None and not callable(split):
        fix = "Write split=lambda *batch: [micro_batch, ...]."
        raise explain(ArgumentTypeError, "split", expected="a function of the batch", got=split, fix=fix)
    return Splitting(make_division(steps, micro_batch_size, micro_batch_weight, own_split=split is not None), axes, weight, split)


def groups_in(source: Source) -> list[Group]:
    """The micro-batches of a source, grouped by shape."""
    return groups_of(source) if isinstance(source, Batch) else _groups_of_parts(source)


def items_in(source: Source) -> int | None:
    """The number of items; None where nobody knows."""
    if isinstance(source, Batch):
        return sum(cut.items for cut in source.cuts)
    known = [_items(part) for part in source]
    return None if None in known else sum(items for items in known if items is not None)


def largest_in(source: Source) -> int | None:
    """The number of items of the largest micro-batch; None where nobody knows."""
    known = [cut.items for cut in source.cuts] if isinstance(source, Batch) else [_items(part) for part in source]
    return None if None in known else max(items for items in known if items is not None)


def _own(items: int, devices: int) -> int:
    if items % devices:
        fix = "Pad the batch and give the padding no weight, or leave items out."
        expected = f"a number of items that {devices} devices divide"
        raise explain(ArgumentValueError, "batch", expected=expected, found=f"{items} items", fix=fix)
    return items // devices


def _part(arguments: tuple[Tree, ...], axes: Tree) -> Batch:
    """A micro-batch of the user's: leaves without items need no ``axes=None``, since nothing is cut any more."""
    if axes == 0:
        axes = jax.tree.map(lambda leaf: 0 if np.ndim(leaf) else None, arguments)
    return make_batch(arguments, axes)


def _items(part: Batch) -> int | None:
    sizes = {np.shape(leaf)[axis] for leaf, axis in zip(part.leaves, part.axes, strict=True) if isinstance(axis, int)}
    return sizes.pop() if len(sizes) == 1 else None


def _groups_of_parts(parts: Parts) -> list[Group]:
    """Parts of one structure, shape and dtype are stacked."""
    kinds: dict[Any, list[int]] = {}
    for number, part in enumerate(parts):
        shapes = tuple((np.shape(leaf), jnp.result_type(leaf)) for leaf in part.leaves)
        kinds.setdefault((part.structure, part.constants, part.axes, shapes), []).append(number)
    return [_group(parts, tuple(numbers)) for numbers in kinds.values()]


def _group(parts: Parts, numbers: tuple[int, ...]) -> Group:
    first = parts[numbers[0]]
    places = jax.tree.map(lambda *leaves: jnp.stack(leaves), *[parts[number].leaves for number in numbers])

    def take(leaves: Tree, index: Scalar) -> MicroBatch:
        held = Batch(leaves, None, tuple(None if is_cut(axis) else axis for axis in first.axes), first.constants, first.structure)
        return MicroBatch(held.arguments(held.taken(0, 0, index)), _items(first), None, index, leaves)

    return Group(numbers, places, take)
