"""How a batch of nested arrays is divided, seen from Python: which leaves have items, how many, and the leaves of one micro-batch.

The core says where to cut. What stands here knows that a leaf is a `mindspore.Tensor` or a NumPy array.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from mindspore import Tensor

from gradaccum import ArgumentTypeError, ArgumentValueError
from gradaccum.kit import Cut, Division, Nest, divided, explain, is_column, leaves_of, mark_lists, require_one_size, spread, with_leaves
from gradaccum_mindspore.large_batch.options import SplitOptions
from gradaccum_mindspore.large_batch.weights import item_weights

PLAIN = (str, bytes, bool, int, float, complex, type(None))
"""A leaf that is one plain value has no items, and is given whole to each micro-batch."""
Batch = tuple[Nest, ...]
"""The arguments of the function that is differentiated."""


class MicroBatch(NamedTuple):
    """One micro-batch: the arguments of one call of the function."""

    arguments: Batch
    items: int | None
    """How many items it has; None where the user's own split made it and its leaves do not say."""
    cut: Cut | None
    """Where it was cut; None where the user's own split made it."""


def micro_batches(batch: Batch, options: SplitOptions, division: Division) -> Iterator[MicroBatch]:
    """The micro-batches in order, each made when it is asked for, after the whole batch was checked.

    Raises:
        ArgumentValueError: the batch holds no item, or leaves of unequal size.
        ArgumentTypeError: an axis is no int, or the user's split gives no micro-batches.
    """
    if options.split is not None:
        return _own_micro_batches(batch, options)
    items = items_of(batch, options.axes)
    batch, _ = mark_lists(batch, options.axes)
    made = divided(division, items, _packing_weights(batch, options, division, items))
    return (MicroBatch(part(batch, options.axes, cut), cut.items, cut) for cut in made)


def items_of(batch: Nest, axes: Nest, *, own_split: bool = False) -> int:
    """How many items all leaves with an axis of items share.

    Args:
        batch: a tuple of arguments.
        axes: a prefix nest of it.
        own_split: whether it is a micro-batch of the user's own split, where lists need no axes, and other objects no None.

    Raises:
        ArgumentValueError: no leaf has items, one has another number than the first, or an axis that a leaf lacks; or a list may be one
            of items.
    """
    marked, lists = mark_lists(batch, axes)
    placed = zip(leaves_of(marked, "batch"), spread(axes, marked, "axes"), strict=True)
    sizes = [(leaf.path, size_along(leaf.value, axis, leaf.path, own_split)) for leaf, axis in placed]
    return require_one_size(((path, size) for path, size in sizes if size is not None), () if own_split else lists)


def size_along(value: object, axis: object, path: str, own_split: bool) -> int | None:
    """The length of a leaf along its axis; None of a leaf that every micro-batch is given whole."""
    if axis is None or isinstance(value, (*PLAIN, np.generic)):
        return None
    if is_column(value):
        return len(value)  # type: ignore[arg-type]
    if isinstance(value, Tensor | np.ndarray):
        require_axis(axis)
        return shape_along(tuple(value.shape), axis, path)
    if own_split:
        return None
    raise no_items_error(path, f"a {type(value).__name__}")


def no_items_error(path: str, found: str) -> ArgumentValueError:
    """The error for a leaf that cannot be cut; `found` says what it is, in words."""
    fix = "Write axes=None for what every micro-batch is given whole, or split= a function."
    return explain(ArgumentValueError, path, expected="a Tensor or array to split", found=found, fix=fix)


def shape_along(shape: tuple[int, ...], axis: Any, path: str) -> int:
    """The length of a shape along an axis.

    Raises:
        ArgumentValueError: the shape has no such axis.
    """
    if not -len(shape) <= axis < len(shape):
        fix = "Write axes=None for a leaf that every micro-batch is given whole, or the axis of its items."
        raise explain(ArgumentValueError, path, expected=f"an array with axis {axis}", found=f"shape {shape}", fix=fix)
    if shape[axis] is None or shape[axis] < 0:
        fix = "Leave dynamic shapes out of mindspore.jit, or call it from Python."
        raise explain(ArgumentValueError, path, expected=f"a known number of items along axis {axis}", found=f"shape {shape}", fix=fix)
    return int(shape[axis])


def require_axis(axis: object) -> None:
    """Refuse what is no axis.

    Raises:
        ArgumentTypeError: `axis` is neither an int nor None.
    """
    if axis is not None and (isinstance(axis, bool) or not isinstance(axis, int)):
        raise explain(ArgumentTypeError, "axes", expected="an int or None for each array", got=axis, fix="Write axes=(0, None), say.")


def part(batch: Batch, axes: Nest, cut: Cut) -> Batch:
    """The micro-batch of the items of a cut."""
    placed = zip(leaves_of(batch), spread(axes, batch, "axes"), strict=True)
    leaves = [sliced(leaf.value, axis, cut) for leaf, axis in placed]
    return with_leaves(batch, iter(leaves))  # type: ignore[return-value]


def sliced(value: Any, axis: Any, cut: Cut) -> Any:
    """The items of a leaf from ``cut.start`` to ``cut.stop``; a leaf without items whole."""
    if axis is None or not (is_column(value) or isinstance(value, Tensor | np.ndarray)):
        return value
    if is_column(value):
        return value[cut.start : cut.stop]
    before = (slice(None),) * (axis % value.ndim)
    return value[(*before, slice(cut.start, cut.stop))]


def _packing_weights(batch: Batch, options: SplitOptions, division: Division, items: int) -> list[float] | None:
    """Each item's weight where the batch is packed by weight: from the array, or from the callable, asked about each item alone."""
    if division.micro_batch_weight is None or options.weight is None:
        return None
    singles = (part(batch, options.axes, Cut(place, place + 1)) for place in range(items))
    return item_weights(options.weight, singles, items)


def _own_micro_batches(batch: Batch, options: SplitOptions) -> Iterator[MicroBatch]:
    """What the user's split gives, made one after the other."""
    split: Any = options.split
    steps = options.division.steps
    given = split(*batch) if steps is None else split(*batch, steps=steps)
    if isinstance(given, Tensor | np.ndarray | str | dict) or not hasattr(given, "__iter__"):
        raise _split_error(f"an object of type {type(given).__name__}")
    return _checked(given, steps)


def _checked(given: Any, steps: int | None) -> Iterator[MicroBatch]:
    count = 0
    for count, arguments in enumerate(given, start=1):
        if not isinstance(arguments, tuple):
            raise _split_error(f"a micro-batch of type {type(arguments).__name__}")
        if steps is not None and count > steps:
            raise _split_error(f"more than the {steps} micro-batches of steps")
        yield MicroBatch(arguments, None, None)
    if count == 0:
        raise _split_error("no micro-batch")


def _split_error(found: str) -> ArgumentTypeError:
    fix = "Write: yield x[:4], y[:4] for each micro-batch; with steps= the function gets steps too."
    return explain(ArgumentTypeError, "split", expected="an iterable of micro-batches, each a tuple of arguments", found=found, fix=fix)
