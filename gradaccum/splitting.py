"""Split a large batch into micro-batches of consecutive items. The splits are computed
from plain numbers, so that all frameworks split a batch in the same way and reject the
same batches.
"""

from __future__ import annotations

import math
import reprlib
import traceback
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, SupportsFloat, TypeVar, cast

from gradaccum.errors import (
    ArgumentTypeError,
    ArgumentValueError,
    GradAccumError,
    UsageError,
    require_int,
    require_weight,
)
from gradaccum.nests import (
    PLAIN,
    Leaf,
    Nest,
    children_of,
    is_column,
    leaves_of,
    lists_of_one_kind,
    spread,
    with_leaves,
)
from gradaccum.options import Options
from gradaccum.transitions import contribution

R = TypeVar("R")


class AutoMicroBatchSize:
    """Finds the largest micro-batch that fits in memory, and remembers its size.

    ``micro_batch_size="auto"`` uses one instance for the whole process. An instance
    that you create remembers its own sizes and may have a memory limit.

    Args:
        memory_limit: the largest number of bytes that a call may use, such as 2 *
            1024**3 (2 GiB). None means the limit that the device reports; a CPU reports
            no limit. Only JAX supports this argument. MindSpore does not support
            ``"auto"`` at all.
    """

    def __init__(self, memory_limit: int | None = None) -> None:
        self.memory_limit = memory_limit
        self._choices: dict[Hashable, int] = {}
        self.size: int | None = None
        """The number of items per micro-batch in the last call; None before the first
        call.
        """

    def search(
        self,
        key: Hashable,
        items: int,
        attempt: Callable[[int, int], R],
        before_retry: Callable[[], object] = lambda: None,
    ) -> R:
        """Run a batch with smaller and smaller micro-batches until they fit in memory.
        Return the result of the successful attempt. If a larger size did not fit,
        remember the successful size for `key`.

        Args:
            key: identifies calls that need about the same memory per item. If a larger
                size did not fit in an earlier call with this key, the size that fitted
                is tried first.
            items: the number of items in the batch. If no size is known for `key`, the
                whole batch is tried first.
            attempt: ``attempt(size, smaller_size)`` runs the batch with micro-batches
                of `size` items. If they do not fit in memory, `attempt` catches the
                framework's own error, and raises a `SmallerSizeError` from it, with the
                next size to try, normally `smaller_size`.
            before_retry: a function that is called before each attempt except the
                first.

        Raises:
            UsageError: a micro-batch of one item does not fit in memory.
        """
        size = min(self._choices.get(key, items), items)
        did_not_fit = False
        while True:
            smaller_size = math.ceil(size / 2) if size > 1 else 0
            try:
                result = attempt(size, smaller_size)
            except SmallerSizeError as error:
                free_frames(error)
                if not error.size:
                    raise too_small_error(self.memory_limit) from error.__cause__
                size = error.size
                did_not_fit = True
            else:
                if did_not_fit:
                    self._choices[key] = min(self._choices.get(key, size), size)
                self.size = size
                return result
            before_retry()

    def forget(self) -> None:
        """Forget all sizes, so that the next call tries the whole batch again. Use this
        after memory has been freed or the model has changed.
        """
        self._choices.clear()
        self.size = None


SHARED = AutoMicroBatchSize()
"""The `AutoMicroBatchSize` that every call with ``micro_batch_size="auto"`` in this
process uses.
"""


class SmallerSizeError(Exception):
    """Micro-batches do not fit in memory. The call has to start over with micro-batches
    of `size` items. A size of 0 means that a single item does not fit.
    """

    def __init__(self, size: int) -> None:
        self.size = size


def free_frames(error: BaseException) -> None:
    """Clear the stack frames in the tracebacks of `error` and of its causes, because
    these frames keep the failed attempt's arrays in memory.
    """
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        each = waiting.pop()
        if each is not None and id(each) not in seen:
            seen.add(id(each))
            traceback.clear_frames(each.__traceback__)
            waiting += (each.__cause__, each.__context__)


def too_small_error(limit: int | None) -> UsageError:
    known = "" if limit is None else f" into {limit} bytes"
    return UsageError(
        "micro_batch_size: expected a micro-batch of one item to fit in memory; got an"
        f" item that does not fit{known}. Recompute activations, shorten the item, or"
        " use a smaller model."
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
    """The maximum number of micro-batches. Each micro-batch contains ceil(items /
    steps) items; the last micro-batch may be smaller.
    """
    micro_batch_size: int | AutoMicroBatchSize | None
    """Items per micro-batch; the last micro-batch may be smaller."""


def make_division(steps: object = None, micro_batch_size: object = None) -> Division:
    """Check the user's options for splitting a batch, and return them as a `Division`.

    Args:
        steps: an int >= 1.
        micro_batch_size: an int >= 1, "auto" or an `AutoMicroBatchSize`.

    Raises:
        ArgumentTypeError, ArgumentValueError: both arguments are passed, neither is
            passed, or the value is invalid.
    """
    if (steps is None) == (micro_batch_size is None):
        count = "neither" if steps is None else "both"
        raise ArgumentValueError(
            f"steps: expected either steps or micro_batch_size; got {count}. Write"
            " steps=4, micro_batch_size=8 or micro_batch_size='auto'."
        )
    if steps is not None:
        return Division(require_int("steps", steps, at_least=1), None)
    if micro_batch_size == "auto":
        return Division(None, SHARED)
    if isinstance(micro_batch_size, AutoMicroBatchSize):
        return Division(None, micro_batch_size)
    size = require_int(
        "micro_batch_size",
        micro_batch_size,
        at_least=1,
        fix='Write micro_batch_size=8 or micro_batch_size="auto".',
    )
    return Division(None, size)


def divided(division: Division, items: int) -> list[Cut]:
    """Return the micro-batches into which a `division` splits `items` items. An
    automatic size must already have been replaced by an int. The last micro-batch may
    be smaller.

    Raises:
        ArgumentValueError: the batch is empty.

    Examples:
        >>> divided(make_division(steps=3), 7)
        [Cut(start=0, stop=3), Cut(start=3, stop=6), Cut(start=6, stop=7)]
    """
    require_items(items)
    size = cast(int, division.micro_batch_size)
    if division.steps is not None:
        size = math.ceil(items / division.steps)
    return [Cut(start, min(start + size, items)) for start in range(0, items, size)]


class MicroBatch(NamedTuple):
    """The arguments of the loss function for one micro-batch."""

    arguments: tuple[Any, ...]
    weight: float
    factor: float
    """The factor by which the micro-batch's loss and gradient are multiplied. It is 0
    if the micro-batch's weight is 0.
    """
    items: int


class LargeBatch:
    """The arguments of the loss function for a large batch, which is to be split into
    micro-batches of consecutive items.

    Args:
        arguments: nests (nested structures of tuples, lists and dicts) of arrays. Each
            array must support NumPy's slicing, such as ``array[2:4]``.
        axes: the batch axis of each array, as a prefix of `arguments`; None for an
            array that is passed whole.
        weight: a function of a micro-batch's arguments, a sequence or an array with one
            number per item, or None, which gives each item weight 1.
    """

    def __init__(
        self, arguments: tuple[Any, ...], axes: Nest, weight: Any = None
    ) -> None:
        self._arguments = arguments
        self._is_flat = all(children_of(argument) is None for argument in arguments)
        self.leaves = leaves_of(arguments, "batch")
        self._axes: list[int | None] = []
        sizes: list[tuple[str, int]] = []
        for leaf, axis in zip(
            self.leaves, spread(axes, arguments, "axes"), strict=True
        ):
            if axis is None or isinstance(leaf.value, PLAIN):
                self._axes.append(None)
                continue
            shape = shape_of(leaf.value)
            index = batch_axis(leaf, shape, cast(int, axis))
            self._axes.append(index)
            sizes.append((leaf.path, shape[index]))
        lists = [] if self._is_flat else lists_of_one_kind(arguments, axes)
        self.items = require_one_size(sizes, lists)
        self._weight = weight
        if weight is not None and not callable(weight):
            numbers = weight.tolist() if hasattr(weight, "tolist") else weight
            self._weight = require_item_weights(numbers, self.items)

    def micro_batches(
        self, division: Division, options: Options
    ) -> Iterator[MicroBatch]:
        cuts = divided(division, self.items)
        columns = [
            slices_of(leaf.value, axis, cuts)
            for leaf, axis in zip(self.leaves, self._axes, strict=True)
        ]
        for cut, *slices in zip(cuts, *columns, strict=True):
            arguments: Any = tuple(slices)
            if not self._is_flat:
                arguments = with_leaves(self._arguments, iter(slices))
            weight = self.weight_of(cut)
            if callable(self._weight):
                weight = require_weight(self._weight(*arguments))
            factor = float(contribution(weight, options)) if weight else 0.0
            yield MicroBatch(arguments, weight, factor, cut.items)

    def weight_of(self, cut: Cut) -> float:
        """Return the weight of the micro-batch that consists of the items in `cut`.
        This is the sum of the items' weights if the user passed one number per item,
        otherwise the number of items.
        """
        if isinstance(self._weight, list):
            return math.fsum(self._weight[cut.start : cut.stop])
        return float(cut.items)


def shape_of(value: Any) -> tuple[int, ...]:
    """Return the shape of an array. A list of plain values has one axis."""
    return (len(value),) if is_column(value) else tuple(getattr(value, "shape", ()))


def batch_axis(leaf: Leaf, shape: tuple[int, ...], axis: int) -> int:
    """Return the batch axis of `leaf` as a number >= 0.

    Raises:
        ArgumentValueError: `shape`, the shape of the leaf, has no such axis.
    """
    if not -len(shape) <= axis < len(shape):
        raise ArgumentValueError(
            f"{leaf.path}: expected an array with axis {axis} as its batch axis; got a"
            f" {type(leaf.value).__name__} of shape {shape}. In axes=, write the batch"
            " axis of this array, or None to pass the array unsplit."
        )
    return axis % len(shape)


def slices_of(value: Any, axis: int | None, cuts: list[Cut]) -> Iterator[Any]:
    """For each cut, yield the slice of `value` along `axis`, or all of `value` if
    `axis` is None. A slice is created only when its micro-batch is needed, because
    slicing may read data from disk or copy it.
    """
    for start, stop in cuts:
        if axis is None:
            yield value
        elif axis == 0:
            yield value[start:stop]
        else:
            axes_before = (slice(None),) * axis
            yield value[(*axes_before, slice(start, stop))]


def merged_aux(
    auxes: list[Nest],
    weights: list[float],
    merge_aux: Any,
    concatenate: Callable[[list[Any]], object],
) -> Any:
    """Return the auxiliary outputs of the large batch: the list `auxes`, or the result
    of merging them with `merge_aux`.

    Args:
        auxes: the auxiliary outputs of the micro-batches.
        weights: the weights of the micro-batches.
        merge_aux: None, "concatenate", or a function of `auxes` and `weights`.
        concatenate: concatenates a list of arrays along their first axis.
    """
    if merge_aux is None:
        return auxes
    if merge_aux == "concatenate":
        return concatenated(auxes, concatenate)
    return merge_aux(auxes, weights)


def concatenated(
    nests: Sequence[Nest], concatenate: Callable[[list[Any]], object]
) -> Nest:
    """Merge `nests`, which all have the same structure, into one nest. Each of its
    leaves is ``concatenate(leaves)``, where `leaves` contains the corresponding leaf of
    each nest.
    """
    columns = zip(
        *([leaf.value for leaf in leaves_of(nest)] for nest in nests), strict=True
    )
    return with_leaves(nests[0], (concatenate(list(column)) for column in columns))


def require_rows(name: str, shape: tuple[int, ...], items: int) -> None:
    """Raise `ArgumentValueError` unless the number of rows in a micro-batch's output is
    a multiple of the number of items.

    Args:
        name: the name of the output in the error: "outputs_fn" or "aux".
        shape: the shape of the output.
        items: the number of items in the micro-batch.
    """
    if shape and shape[0] % items == 0:
        return
    alternative = "pass a function as merge_aux"
    if name == "outputs_fn":
        alternative = "compute it in loss_fn from the outputs of all items"
    raise ArgumentValueError(
        f"{name}: expected the same number of rows for each item, because the rows of"
        f" all micro-batches are concatenated; got shape {shape} for a micro-batch of"
        f" {items} items. Return one value per item, or {alternative}."
    )


def require_one_size(
    sizes: Iterable[tuple[str, int]], lists: Iterable[tuple[str, int]] = ()
) -> int:
    """Return the number of items in a batch. Raise unless all arrays have the same
    number of items. Also raise if a list of similar elements is as long as the batch,
    because the user may have passed a list of items instead of an array.

    Args:
        sizes: the path of each leaf that is split, and its length along the batch axis.
        lists: the path and the length of each list of similar elements, as
            `lists_of_one_kind` returns them.

    Raises:
        ArgumentValueError: no leaf is split, two leaves have different numbers of
            items, or the elements of a list may be the items.
    """
    sizes = list(sizes)
    if not sizes:
        raise ArgumentValueError(
            "batch: expected an array to split; got a batch in which every leaf is"
            " passed unsplit. Pass at least one array with a batch axis."
        )
    first_path, items = sizes[0]
    for path, length in lists:
        if length == items:
            raise ArgumentValueError(
                f"{path}: expected a list of arrays that each contain all items; got"
                f" {length} similar elements, which look like individual items. If they"
                " are items, stack them into one array. Otherwise, in axes=, write one"
                " axis per element, such as [0, 0], or None to pass the list unsplit."
            )
    for path, size in sizes:
        if size != items:
            raise ArgumentValueError(
                f"{path}: expected {items} items, as in {first_path}; got {size} items."
                ' In axes=, write the batch axis of this array, "key" for a JAX random'
                " key, or None to pass the array unsplit. If a list has one element per"
                " item, stack the elements into one array."
            )
    return items


def require_items(items: int) -> None:
    """Raise `ArgumentValueError` if the batch has no items."""
    if items == 0:
        raise ArgumentValueError(
            "batch: expected at least one item; got 0 items. Skip empty batches,"
            " because they have no gradient and no mean."
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
    """Return the error for invalid weights. There must be exactly one weight per item,
    and each weight must be finite and >= 0. `expected` is the number of items, and
    `found` describes the invalid weights.
    """
    return ArgumentValueError(
        f"weight: expected {expected} finite numbers >= 0, one per item; got {found}."
        " Pass one number per item, or a function that takes a micro-batch and returns"
        " its weight."
    )


def scalar_loss_error(found: str) -> GradAccumError:
    """Return the error for a loss that is not a scalar; `found` describes the loss."""
    return ArgumentValueError(
        f"loss_fn: expected a function that returns a scalar loss; got {found}. Return"
        " loss.mean() for reduction='mean', or loss.sum() for reduction='sum' or"
        " 'sum_per_item'."
    )


def missing_aux_error(got: object) -> GradAccumError:
    """Return the error for a loss function that returns `got` instead of a pair
    ``(loss, aux)``. Without this error, an array of two losses would be unpacked as a
    pair.
    """
    return ArgumentTypeError(
        "loss_fn: expected a function that returns (loss, aux), because has_aux=True;"
        f" got a function that returns an object of type {type(got).__name__}. Return"
        " both, or leave has_aux out."
    )
