"""The cuts of a large batch into micro-batches of consecutive items, in plain numbers:
all frameworks cut and refuse the same.
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Hashable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, SupportsFloat

from gradaccum.errors import (
    ArgumentValueError,
    GradAccumError,
    UsageError,
    explain,
    require_int,
    require_number,
)

# The largest micro-batch that fits, found once and remembered. The backend knows when
# memory runs out. The first try is the whole batch, or what fitted last time; after a
# failure the size is halved, rounded up, and 1 is the last.


_BYTES = "Write bytes: memory_limit=2 * 1024**3 is 2 GiB."


class AutoMicroBatchSize:
    """Finds the largest micro-batch that fits, and remembers it.

    ``micro_batch_size="auto"`` uses an instance shared by the process. An instance of
    your own has its own sizes and may have a limit.

    Args:
        memory_limit: JAX alone: the most bytes that the call may use; None asks the
            device. A CPU has no limit to ask for. MindSpore has no automatic size.

    Raises:
        ArgumentTypeError, ArgumentValueError: `memory_limit` is no int >= 1.
    """

    def __init__(self, memory_limit: int | None = None) -> None:
        if memory_limit is None:
            self.memory_limit = None
        else:
            self.memory_limit = require_int(
                "memory_limit", memory_limit, at_least=1, fix=_BYTES
            )
        self._choices: dict[Hashable, int] = {}
        self._last: int | None = None

    @property
    def size(self) -> int | None:
        """The last call's items in a micro-batch; None before the first."""
        return self._last

    @property
    def choices(self) -> Mapping[Hashable, int]:
        """Every size that was found, by its key."""
        return MappingProxyType(self._choices)

    def start(self, key: Hashable, items: int) -> int:
        """Return the size to try first: the size that fitted `key` before, or all
        `items`.
        """
        return min(self._choices.get(key, items), items)

    def after_failure(self, size: int) -> int:
        """Return the size to try after `size` did not fit: half of it, rounded up.

        Raises:
            UsageError: `size` is 1 already. Raise it from the framework's own error.
        """
        if size <= 1:
            raise too_small_error(self.memory_limit)
        return math.ceil(size / 2)

    def remember(self, key: Hashable, size: int) -> None:
        """Note that `size` fitted `key`."""
        self._choices[key] = self._last = size

    def forget(self) -> None:
        """Try the whole batch again, after memory was freed or the model changed."""
        self._choices.clear()
        self._last = None

    def __repr__(self) -> str:
        return (
            f"AutoMicroBatchSize(memory_limit={self.memory_limit}, size={self._last})"
        )


SHARED = AutoMicroBatchSize()
"""What ``micro_batch_size="auto"`` stands for."""


def require_micro_batch_size(value: object) -> int | AutoMicroBatchSize:
    """Raise unless `value` is an int >= 1, "auto" or an `AutoMicroBatchSize`."""
    expected = 'an int >= 1 or "auto"'
    fix = 'Write micro_batch_size=8 or micro_batch_size="auto".'
    if isinstance(value, AutoMicroBatchSize):
        return value
    if isinstance(value, str) and value == "auto":
        return SHARED
    if isinstance(value, str):
        raise explain(
            ArgumentValueError,
            "micro_batch_size",
            expected=expected,
            got=value,
            fix=fix,
        )
    return require_int("micro_batch_size", value, at_least=1, fix=fix)


def free_frames(error: BaseException) -> None:
    """Clear the frames of `error` and of its causes, whose tracebacks keep the failed
    attempt's arrays in memory.
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
    """Return the error for an automatic size on a `device` that states no memory
    limit.
    """
    fix = (
        "Write micro_batch_size=AutoMicroBatchSize(memory_limit=2 * 1024**3), the bytes"
        " that the call may use, or a number of items."
    )
    return explain(
        ArgumentValueError,
        "micro_batch_size",
        expected="a device with a known limit",
        found=f"auto on {device}",
        fix=fix,
    )


def too_small_error(limit: int | None) -> UsageError:
    """Return the error for a micro-batch of one item that does not fit."""
    known = "" if limit is None else f" into {limit} bytes"
    fix = "Recompute activations, shorten the item, or use a smaller model."
    found = f"one that does not fit{known}"
    return explain(
        UsageError,
        "micro_batch_size",
        expected="a micro-batch of one item to fit",
        found=found,
        fix=fix,
    )


BY_ITEM = "write 'items', or split= a function"


class Cut(NamedTuple):
    """The items of one micro-batch, from `start` up to, not including, `stop`."""

    start: int
    stop: int

    @property
    def items(self) -> int:
        return self.stop - self.start


class Division(NamedTuple):
    """The way to divide a batch: at most one of the three is set; none where the user's
    own `split` decides.
    """

    steps: int | None
    """At most so many micro-batches, of ceil(items / steps) items."""
    micro_batch_size: int | AutoMicroBatchSize | None
    """Items of a micro-batch; the last one may be smaller."""
    micro_batch_weight: float | None
    """The weight up to which consecutive items are packed."""


def make_division(
    steps: object = None,
    micro_batch_size: object = None,
    micro_batch_weight: object = None,
    *,
    own_split: bool = False,
) -> Division:
    """Check how the user asks to divide the batch.

    Args:
        steps: an int >= 1.
        micro_batch_size: an int >= 1, "auto" or an `AutoMicroBatchSize`.
        micro_batch_weight: a finite number > 0.
        own_split: the user passes a `split` function, alone or beside `steps`.

    Raises:
        ArgumentTypeError, ArgumentValueError: none or several are given, or one is not
            as above.
    """
    given = {
        "steps": steps,
        "micro_batch_size": micro_batch_size,
        "micro_batch_weight": micro_batch_weight,
    }
    names = [name for name, value in given.items() if value is not None]
    if (
        len(names) > 1
        or (not names and not own_split)
        or (own_split and names not in ([], ["steps"]))
    ):
        raise _choice_error(names, own_split)
    return Division(
        None if steps is None else require_int("steps", steps, at_least=1),
        (
            None
            if micro_batch_size is None
            else require_micro_batch_size(micro_batch_size)
        ),
        (
            None
            if micro_batch_weight is None
            else require_number("micro_batch_weight", micro_batch_weight, above=0)
        ),
    )


def cuts(items: int, size: int) -> tuple[Cut, ...]:
    """Cut `items` into micro-batches of `size`; the last one may be smaller.

    Examples:
        >>> cuts(7, 3)
        (Cut(start=0, stop=3), Cut(start=3, stop=6), Cut(start=6, stop=7))
    """
    return tuple(
        Cut(start, min(start + size, items)) for start in range(0, items, size)
    )


def size_for(items: int, steps: int) -> int:
    """Return ceil(items / steps), the smallest size with at most `steps` micro-batches:
    nine items in four steps are three of three.

    Raises:
        ArgumentValueError: there is no item.
    """
    require_items(items)
    return math.ceil(items / steps)


def packed(weights: Sequence[float], budget: float) -> tuple[Cut, ...]:
    """Pack consecutive items into micro-batches of at most `budget` each, in order.

    Args:
        weights: each item's, finite and >= 0.
        budget: the most that a micro-batch may hold.

    Raises:
        ArgumentValueError: one item alone is heavier than the budget, or there is no
            item.

    Examples:
        >>> packed([3, 1, 2, 4], 4)
        (Cut(start=0, stop=2), Cut(start=2, stop=3), Cut(start=3, stop=4))
    """
    require_items(len(weights))
    made = []
    start = 0
    held = 0.0
    for place, weight in enumerate(weights):
        if weight > budget:
            raise _heavy_item_error(place, weight, budget)
        if held + weight > budget:
            made.append(Cut(start, place))
            start = place
            held = 0.0
        held += weight
    return (*made, Cut(start, len(weights)))


def divided(
    division: Division, items: int, weights: Sequence[float] | None
) -> tuple[Cut, ...]:
    """Return the cuts of `items` by a `division`, whose automatic size is an int by
    now.

    Raises:
        ArgumentValueError: the batch is empty, or is to be packed without each item's
            `weights`.
    """
    require_items(items)
    if division.micro_batch_weight is not None:
        return packed(_require_known(weights), division.micro_batch_weight)
    if division.steps is not None:
        return cuts(items, size_for(items, division.steps))
    assert isinstance(division.micro_batch_size, int)
    return cuts(items, division.micro_batch_size)


def require_one_size(
    sizes: Iterable[tuple[str, int]],
    lists: Sequence[tuple[str, int, str]] = (),
    by_item: str = BY_ITEM,
) -> int:
    """Raise unless all leaves have the same number of items; return that number.

    Args:
        sizes: path and length along the batch axis of each leaf that is split.
        lists: from `mark_lists`.
        by_item: what the user writes where the elements of a list are the items.

    Raises:
        ArgumentValueError: no leaf is split, a leaf has another length than the first,
            or a list may be as long as the batch.
    """
    known = list(sizes)
    # Beside a list, or an array, that is as long, a record may be one of items: eight
    # images of three channels, and their eight targets.
    alike = _elsewhere(known, lists) | {
        each[1] for each in lists if not _is_record(*each, known)
    }
    lists = [each for each in lists if each[1] in alike or not _is_record(*each, known)]
    elsewhere = _elsewhere(known, lists)
    for path, length, brackets in lists:
        if not elsewhere or length in elsewhere:
            raise _doubtful_list_error(path, length, brackets, by_item)
    if not known:
        fix = (
            "Give at least one array with a batch axis, or split= a function of your"
            " own."
        )
        raise explain(
            ArgumentValueError,
            "batch",
            expected="an array to split",
            found="none: every leaf is given whole",
            fix=fix,
        )
    (first, items), *others = known
    for path, size in others:
        if size != items:
            fix = (
                "Write axes=None for a leaf that every micro-batch is given whole, its"
                " axis for another one, or split= a function."
            )
            if any(path.startswith(f"{place}[") for place, *_ in lists):
                fix = (
                    f"If the elements of the list around it are the items, {by_item}."
                    f" {fix}"
                )
            raise explain(
                ArgumentValueError,
                path,
                expected=f"{items} items, as {first} has",
                found=f"{size}",
                fix=fix,
            )
    return items


def _elsewhere(
    known: Sequence[tuple[str, int]], lists: Sequence[tuple[str, int, str]]
) -> set[int]:
    """Return the lengths of leaves that stand in none of `lists`."""
    return {
        size
        for path, size in known
        if not any(path.startswith(f"{place}[") for place, *_ in lists)
    }


def _is_record(
    place: str, length: int, brackets: str, known: Sequence[tuple[str, int]]
) -> bool:
    """True if a tuple holds arrays of one length that is not its own, as ``(x, y)``
    does.
    """
    own = {f"{place}[{index}]" for index in range(length)}
    sizes = [size for path, size in known if path in own]
    return brackets == "()" and len(sizes) == length and len({*sizes, length}) == 2


def require_items(items: int) -> None:
    """Raise unless the batch has an item (`ArgumentValueError`)."""
    if items == 0:
        fix = "Skip a batch that holds nothing: it has no gradient and no mean."
        raise explain(
            ArgumentValueError,
            "batch",
            expected="at least one item",
            found="0 items",
            fix=fix,
        )


def require_item_weights(weights: Iterable[SupportsFloat], items: int) -> list[float]:
    """Raise unless there is one finite number >= 0 for each of `items`; return them as
    floats.
    """
    try:
        numbers = [float(weight) for weight in weights]
    except (TypeError, ValueError):
        raise item_weights_error(items, "values that are no numbers") from None
    if len(numbers) != items:
        raise item_weights_error(items, f"{len(numbers)} numbers")
    for place, weight in enumerate(numbers):
        if not 0 <= weight < math.inf:
            raise item_weights_error(items, f"{weight} for item {place}")
    return numbers


def item_weights_error(expected: int, found: str) -> GradAccumError:
    """Return the error for weights that are not one finite number >= 0 per item."""
    fix = (
        "Give one number per item, or a callable of the micro-batch that returns its"
        " weight."
    )
    return explain(
        ArgumentValueError,
        "weight",
        expected=f"{expected} finite numbers >= 0, one per item",
        found=found,
        fix=fix,
    )


def scalar_loss_error(found: str) -> GradAccumError:
    """Return the error for a loss that is no scalar; `found` describes it in words."""
    fix = (
        "Reduce it in the loss: loss.mean() goes with reduction='mean', loss.sum() with"
        " 'sum' or 'sum_per_item'."
    )
    return explain(
        ArgumentValueError,
        "loss_fn",
        expected="a function that returns a scalar loss",
        found=found,
        fix=fix,
    )


def aux_shape_error(found: str, *, declared: bool) -> GradAccumError:
    """Return the error for an aux that is returned and not declared, or declared and
    not returned.
    """
    if declared:
        expected = "a function that returns (loss, aux)"
    else:
        expected = "a function that returns a scalar loss"
    if not declared:
        fix = "Declare how it merges, as aux='mean', or return the loss alone."
    else:
        fix = "Return both, or leave aux out."
    return explain(
        ArgumentValueError, "loss_fn", expected=expected, found=found, fix=fix
    )


def _require_known(weights: Sequence[float] | None) -> Sequence[float]:
    if weights is None:
        fix = "Write weight= an array with one number per item, as weight=lengths."
        raise explain(
            ArgumentValueError,
            "weight",
            expected="per-item weights beside micro_batch_weight",
            found="none",
            fix=fix,
        )
    return weights


def _doubtful_list_error(
    path: str, length: int, brackets: str, by_item: str
) -> GradAccumError:
    each = (
        brackets[0]
        + ", ".join(["0"] * min(length, 2) + ["..."] * (length > 2))
        + brackets[1]
    )
    whole = (
        f"if each element holds all items write {each} for it in axes=, or None if it"
        " is given whole"
    )
    found = f"{length} elements of one kind, which may be the items"
    fix = f"Tell what they are: {whole}; if its elements are the items, {by_item}."
    return explain(
        ArgumentValueError,
        path,
        expected="a list that axes= speak of",
        found=found,
        fix=fix,
    )


def _choice_error(names: Sequence[str], own_split: bool) -> GradAccumError:
    if own_split:
        expected = "split alone or with steps"
    else:
        expected = "one of steps, micro_batch_size and micro_batch_weight"
    found = " and ".join(names) or "none"
    if not own_split:
        fix = "Write steps=4, or micro_batch_size=8, or micro_batch_size='auto'."
    else:
        fix = "Leave out the others."
    return explain(ArgumentValueError, "steps", expected=expected, found=found, fix=fix)


def _heavy_item_error(place: int, weight: float, budget: float) -> GradAccumError:
    expected = f"no item heavier than micro_batch_weight={budget:g}"
    fix = "Raise micro_batch_weight, or shorten the item: an item is never cut."
    return explain(
        ArgumentValueError,
        "weight",
        expected=expected,
        found=f"{weight:g} for item {place}",
        fix=fix,
    )
