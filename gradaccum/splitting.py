"""Split a large batch into micro-batches of consecutive items. The splits are computed
from plain numbers, so that all frameworks split a batch in the same way and reject the
same batches.
"""

from __future__ import annotations

import math
import reprlib
import traceback
from collections.abc import Hashable, Iterable, Sequence
from typing import NamedTuple, SupportsFloat, cast

from gradaccum.errors import (
    ArgumentTypeError,
    ArgumentValueError,
    GradAccumError,
    UsageError,
    require_int,
)
from gradaccum.nests import ListOfOneKind

# The largest micro-batch that fits is found once and remembered. The backend notices
# when memory runs out. The first attempt is the whole batch, or the size that fitted
# last time. After a failure the size is halved and rounded up, down to 1.


_SIZE = 'Write micro_batch_size=8 or micro_batch_size="auto".'


class AutoMicroBatchSize:
    """Finds the largest micro-batch that fits in memory, and remembers its size.

    ``micro_batch_size="auto"`` uses one instance for the whole process. An instance
    that you create remembers its own sizes and may have a memory limit.

    Args:
        memory_limit: only in JAX: the largest number of bytes that the call may use,
            for example 2 * 1024**3 for 2 GiB. None means the limit that the device
            reports; a CPU reports no limit. MindSpore has no automatic size.
    """

    def __init__(self, memory_limit: int | None = None) -> None:
        self.memory_limit = memory_limit
        self._choices: dict[Hashable, int] = {}
        self.size: int | None = None
        """The number of items per micro-batch in the last call; None before the first
        call.
        """

    def start(self, key: Hashable, items: int) -> int:
        """Return the number of items to try first: the size that fitted in memory
        before for the same `key`, or all `items`.
        """
        return min(self._choices.get(key, items), items)

    def after_failure(self, size: int) -> int:
        """Return the number of items to try after `size` items did not fit in memory:
        half of `size`, rounded up.

        Raises:
            UsageError: `size` is already 1. Raise this error from the framework's own
                error.
        """
        if size <= 1:
            raise too_small_error(self.memory_limit)
        return math.ceil(size / 2)

    def remember(self, key: Hashable, size: int) -> None:
        """Record that `size` items fitted in memory for `key`."""
        self._choices[key] = size
        self.size = size

    def forget(self) -> None:
        """Forget all sizes, so that the next call tries the whole batch again. Use this
        after memory was freed or the model changed.
        """
        self._choices.clear()
        self.size = None


SHARED = AutoMicroBatchSize()
"""The instance that ``micro_batch_size="auto"`` uses."""


def require_micro_batch_size(value: object) -> int | AutoMicroBatchSize:
    """Raise unless `value` is an int >= 1, "auto" or an `AutoMicroBatchSize`; return
    the int or the `AutoMicroBatchSize`.
    """
    if isinstance(value, AutoMicroBatchSize):
        return value
    if value == "auto":
        return SHARED
    return require_int("micro_batch_size", value, at_least=1, fix=_SIZE)


def free_frames(error: BaseException) -> None:
    """Clear the stack frames of `error` and of its causes, because their tracebacks
    keep the failed attempt's arrays in memory.
    """
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        each = waiting.pop()
        if each is not None and id(each) not in seen:
            seen.add(id(each))
            traceback.clear_frames(each.__traceback__)
            waiting += (each.__cause__, each.__context__)


def unknown_limit_error(device: str) -> GradAccumError:
    """Return the error for an automatic size on a `device` that reports no memory
    limit.
    """
    return ArgumentValueError(
        "micro_batch_size: expected a device that reports its memory limit; got 'auto'"
        f" on {device}. Write micro_batch_size="
        "AutoMicroBatchSize(memory_limit=2 * 1024**3) with the number of bytes that the"
        " call may use, or pass a number of items."
    )


def too_small_error(limit: int | None) -> UsageError:
    """Return the error for a micro-batch of one item that does not fit in memory."""
    known = "" if limit is None else f" into {limit} bytes"
    return UsageError(
        "micro_batch_size: expected a micro-batch of one item to fit; got an item that"
        f" does not fit{known}. Recompute activations, shorten the item, or use a"
        " smaller model."
    )


class Cut(NamedTuple):
    """The items of one micro-batch, from `start` up to but not including `stop`."""

    start: int
    stop: int

    @property
    def items(self) -> int:
        return self.stop - self.start


class Division(NamedTuple):
    """How to split a batch. Exactly one of the two fields is set."""

    steps: int | None
    """The largest number of micro-batches. Each has ceil(items / steps) items, except
    that the last may have fewer.
    """
    micro_batch_size: int | AutoMicroBatchSize | None
    """Items per micro-batch; the last micro-batch may be smaller."""


def make_division(steps: object = None, micro_batch_size: object = None) -> Division:
    """Check how the user wants to split the batch, and return it as a `Division`.

    Args:
        steps: an int >= 1.
        micro_batch_size: an int >= 1, "auto" or an `AutoMicroBatchSize`.

    Raises:
        ArgumentTypeError, ArgumentValueError: both or neither are passed, or the value
            is invalid.
    """
    if (steps is None) == (micro_batch_size is None):
        count = "neither" if steps is None else "both"
        raise ArgumentValueError(
            f"steps: expected either steps or micro_batch_size; got {count}. Write"
            " steps=4, micro_batch_size=8 or micro_batch_size='auto'."
        )
    if steps is not None:
        return Division(require_int("steps", steps, at_least=1), None)
    return Division(None, require_micro_batch_size(micro_batch_size))


def cuts(items: int, size: int) -> tuple[Cut, ...]:
    """Split `items` items into micro-batches of `size` items; the last micro-batch may
    be smaller.

    Examples:
        >>> cuts(7, 3)
        (Cut(start=0, stop=3), Cut(start=3, stop=6), Cut(start=6, stop=7))
    """
    return tuple(
        Cut(start, min(start + size, items)) for start in range(0, items, size)
    )


def divided(division: Division, items: int) -> tuple[Cut, ...]:
    """Return the micro-batches into which a `division` splits `items` items. An
    automatic size must already have been replaced by an int. With `steps` a micro-batch
    has ceil(items / steps) items: nine items in four steps become three micro-batches
    of three items.

    Raises:
        ArgumentValueError: the batch is empty.
    """
    require_items(items)
    if division.steps is not None:
        return cuts(items, math.ceil(items / division.steps))
    return cuts(items, cast(int, division.micro_batch_size))


def require_one_size(
    sizes: Iterable[tuple[str, int]], lists: Sequence[ListOfOneKind] = ()
) -> int:
    """Raise unless all leaves have the same number of items; return that number.

    A list may have one element per item: a list of eight images with three channels
    each looks like three items with eight arrays each. So a list is rejected if it is
    as long as the batch, or if it contains all arrays of the batch.

    Args:
        sizes: the path of each leaf that is split, and its length along the batch axis.
        lists: the result of `lists_of_one_kind`.

    Raises:
        ArgumentValueError: no leaf is split, a leaf differs in length from the first
            leaf, or the elements of a list may be the items.
    """
    sizes = list(sizes)
    if not sizes:
        raise ArgumentValueError(
            "batch: expected an array to split; got a batch in which every leaf is"
            " passed whole. Pass at least one array with a batch axis."
        )
    items = sizes[0][1]
    for one_list in lists:
        inside = [path.startswith(f"{one_list.path}[") for path, _ in sizes]
        holds_all = all(inside) and not one_list.is_tuple
        if one_list.length == items or holds_all:
            raise _list_error(one_list)
    for path, size in sizes:
        if size != items:
            raise ArgumentValueError(
                f"{path}: expected {items} items, as in {sizes[0][0]}; got {size}"
                " items. In axes= write the batch axis of this leaf, or None to pass"
                " the leaf whole. If a list has one element per item, stack the"
                " elements into one array."
            )
    return items


def _list_error(one_list: ListOfOneKind) -> GradAccumError:
    return ArgumentValueError(
        f"{one_list.path}: expected a list in which each element contains all items;"
        f" got {one_list.length} elements of one kind, which may be the items. Stack"
        " the elements into one array if they are the items. Otherwise write an axis"
        " for each element in axes=, such as [0, 0], or None to pass the list whole."
    )


def require_items(items: int) -> None:
    """Raise `ArgumentValueError` if the batch has no items."""
    if items == 0:
        raise ArgumentValueError(
            "batch: expected at least one item; got 0 items. Skip an empty batch,"
            " because it has no gradient and no mean."
        )


def require_item_weights(weights: Iterable[SupportsFloat], items: int) -> list[float]:
    """Raise unless `weights` has one finite number >= 0 for each of `items` items;
    return the weights as floats.
    """
    numbers = [float(weight) for weight in weights]
    if len(numbers) != items or not all(0 <= number < math.inf for number in numbers):
        raise item_weights_error(items, reprlib.repr(weights))
    return numbers


def item_weights_error(expected: int, found: str) -> GradAccumError:
    """Return the error for weights that are not one finite number >= 0 per item."""
    return ArgumentValueError(
        f"weight: expected {expected} finite numbers >= 0, one per item; got {found}."
        " Pass one number per item, or a callable of the micro-batch that returns its"
        " weight."
    )


def scalar_loss_error(found: str) -> GradAccumError:
    """Return the error for a loss that is not a scalar; `found` describes the loss."""
    return ArgumentValueError(
        f"loss_fn: expected a function that returns a scalar loss; got {found}. Return"
        " loss.mean() for reduction='mean', or loss.sum() for reduction='sum' or"
        " 'sum_per_item'."
    )


def missing_aux_error(got: object) -> GradAccumError:
    """Return the error for a loss function that returns only `got`, although
    ``has_aux`` is set. An array of two losses could otherwise be unpacked as a pair.
    """
    return ArgumentTypeError(
        "loss_fn: expected a function that returns (loss, aux), because of"
        f" has_aux=True; got an object of type {type(got).__name__}. Return both, or"
        " leave has_aux out."
    )
