"""The largest micro-batch that fits, found once and remembered: what ``micro_batch_size="auto"`` means in every backend.

The backend knows when memory runs out; the rule is here. The first try is the whole batch, or what fitted last time; after a failure the
size is halved, rounded up, and 1 is the last.
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Hashable, Mapping
from types import MappingProxyType

from gradaccum._validation import require_int
from gradaccum.errors import ArgumentValueError, GradAccumError, UsageError, explain

_BYTES = "Write bytes: memory_limit=2 * 1024**3 is 2 GiB."


class AutoMicroBatchSize:
    """Finds the largest micro-batch that fits, and remembers it.

    ``micro_batch_size="auto"`` uses one that the whole process shares; an instance of your own keeps its choices apart, takes a limit and
    is where you read them.

    Args:
        memory_limit: the most bytes that the call may use; None asks the device. A CPU has no limit to ask for.

    Raises:
        ArgumentTypeError: `memory_limit` is no int.
        ArgumentValueError: `memory_limit` is below 1.

    Examples:
        >>> sizes = AutoMicroBatchSize(memory_limit=2 * 1024**3)
        >>> sizes.size is None  # nothing has run yet
        True
    """

    def __init__(self, memory_limit: int | None = None) -> None:
        self.memory_limit = None if memory_limit is None else require_int("memory_limit", memory_limit, at_least=1, fix=_BYTES)
        self._choices: dict[Hashable, int] = {}
        self._last: int | None = None

    @property
    def size(self) -> int | None:
        """The size of micro-batch that the last call ran with, in items; None before the first."""
        return self._last

    @property
    def choices(self) -> Mapping[Hashable, int]:
        """Every size that was found, by what it was found for."""
        return MappingProxyType(self._choices)

    def start(self, key: Hashable, items: int) -> int:
        """The size to try first: what fitted `key` before, or all `items` at once."""
        return min(self._choices.get(key, items), items)

    def after_failure(self, size: int) -> int:
        """The size to try after `size` did not fit: half of it, rounded up.

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
        """Try from the whole batch again: after memory was freed or the model changed."""
        self._choices.clear()
        self._last = None

    def __repr__(self) -> str:
        return f"AutoMicroBatchSize(memory_limit={self.memory_limit}, size={self._last})"


SHARED = AutoMicroBatchSize()
"""What ``micro_batch_size="auto"`` stands for."""


def require_micro_batch_size(value: object) -> int | AutoMicroBatchSize:
    """`value` as a number of items or as an automatic size.

    Raises:
        ArgumentTypeError: `value` is neither an int, "auto" nor an `AutoMicroBatchSize`.
        ArgumentValueError: it is below 1, or another text than "auto".
    """
    expected, fix = 'an int >= 1 or "auto"', 'Write micro_batch_size=8 or micro_batch_size="auto".'
    if isinstance(value, AutoMicroBatchSize):
        return value
    if isinstance(value, str) and value == "auto":
        return SHARED
    if isinstance(value, str):
        raise explain(ArgumentValueError, "micro_batch_size", expected=expected, got=value, fix=fix)
    return require_int("micro_batch_size", value, at_least=1, fix=fix)


def free_frames(error: BaseException) -> None:
    """Free what the frames of `error` hold, and of those errors that it came from: somebody else may still hold the error.

    A traceback keeps the arrays of the attempt that failed, and the next attempt would lack their memory.
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
    """The error for an automatic size on a `device` that states no limit of memory."""
    fix = "Write micro_batch_size=AutoMicroBatchSize(memory_limit=2 * 1024**3), the bytes that the call may use, or a number of items."
    return explain(ArgumentValueError, "micro_batch_size", expected="a device with a known limit", found=f"auto on {device}", fix=fix)


def too_small_error(limit: int | None) -> UsageError:
    """The error for a micro-batch of one item that does not fit."""
    known = "" if limit is None else f" into {limit} bytes"
    fix = "Recompute activations (recompute), shorten the item, or use a smaller model."
    found = f"one that does not fit{known}"
    return explain(UsageError, "micro_batch_size", expected="a micro-batch of one item to fit", found=found, fix=fix)
