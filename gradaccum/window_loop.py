"""Functions for passes over a loader: `updates_in` counts the updates, `epoch` flushes
at the end of a pass, and `windows` reads a pass window by window. `windows` reads all
micro-batches of a window before the first forward pass of the window, so that the
window's totals, such as its number of tokens, are known in advance.

If a loss is divided by a single number, such as its number of tokens, no totals are
needed: pass this number as the micro-batch's weight. If a loss is a sum of terms that
are divided by different numbers, divide each term by its own total over the window, and
wrap the optimizer with ``reduction="sum"``.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from itertools import islice
from typing import Any, Generic, SupportsFloat, TypeVar, cast

from gradaccum.errors import (
    ArgumentValueError,
    GradAccumWarning,
    UsageError,
    require_number,
)
from gradaccum.nests import leaves_of
from gradaccum.options import Schedule, UntilWeight, make_schedule, require_steps
from gradaccum.transitions import select, steps_at

M = TypeVar("M")
Count = Callable[[M], SupportsFloat]
"""A function that returns a number for a micro-batch, such as its number of tokens. The
result is a Python number or a framework's scalar.
"""
Reduce = Callable[[list[float]], Iterable[SupportsFloat]]
"""A function that takes one worker's list of numbers and returns their sums over all
workers.
"""

_ROUNDING = 1e-5
"""The relative error that is allowed in a sum over the workers, which may be rounded to
float32. A `reduce` function that computes a mean by mistake causes a larger error.
"""

_UNEQUAL = (
    "gradaccum: micro-batches of {} and {} items count equally, because {}. If the loss"
    " is a mean over the items, {}. If the micro-batches should count equally, pass"
    " weight=1."
)
_NUMBER_OF_KEYS = (
    "their weight is the number of keys in a dictionary, which is what len(batch)"
    " returns"
)


def updates_in(
    micro_batches: Sized | int,
    steps: object,
    *,
    epochs: int = 1,
    optimizer_step: int = 0,
    micro_step: int = 0,
) -> int:
    """Return the number of updates in `epochs` passes over a loader, with a flush at
    the end of each pass. Use this number as the length of a learning-rate schedule.

    Args:
        micro_batches: the loader if it has a length, otherwise its number of
            micro-batches, an int >= 0.
        steps: an int, a list of pairs or a callable, as for `gradaccum.wrap`.
        epochs: the number of passes over the loader, an int >= 0.
        optimizer_step: the number of updates applied before these passes. It is needed
            only if `steps` depends on this number.
        micro_step: the number of micro-batches in a window that is already open. The
            first pass completes this window.

    Raises:
        TypeError: `micro_batches` has no length, or `steps` defines windows by total
            weight.

    Examples:
        >>> updates_in(10, steps=4, epochs=2)  # 4, 4 and 2 micro-batches, twice
        6
    """
    schedule = make_schedule(steps)
    if not isinstance(micro_batches, int):
        micro_batches = len(micro_batches)
    updates = optimizer_step
    for _ in range(epochs):
        to_read = micro_batches
        while to_read + micro_step > 0:
            to_read -= max(cast(int, _size(schedule, updates)) - micro_step, 0)
            micro_step = 0
            updates += 1
    return updates - optimizer_step


class Sizes:
    """Issues one `GradAccumWarning` if micro-batches have different numbers of items,
    but count equally. This happens if they have no weights, or if the weight of each
    micro-batch is the number of keys in a dictionary.
    """

    def __init__(
        self, reduction: str, fix: str = "pass the number of items as weight="
    ) -> None:
        self.weighed = True
        """bool: False if the last micro-batch has no weight, and `see` has not checked
        it yet.
        """
        self.weight: Any = None
        """The last weight that the user passed, or None."""
        self._looks = reduction == "mean"
        self._weighs_by_keys = True
        """Whether every weight so far was the number of keys in its micro-batch."""
        self._first = 0
        self._fix = fix

    def see(self, micro_batch: object) -> None:
        """Compare the number of items in the last micro-batch with the number in the
        first micro-batch, and warn if they differ.
        """
        reason = "they have no weight"
        if self.weighed:
            keys = len(micro_batch) if isinstance(micro_batch, Mapping) else 0
            self._weighs_by_keys &= keys > 1 and self.weight == keys
            if not self._weighs_by_keys:
                return
            reason = _NUMBER_OF_KEYS
        if not self._looks:
            return
        self.weighed = True
        items = number_of_items(micro_batch)
        if items is None:
            self._looks = False
        elif items and self._first not in (0, items):
            self._looks = False
            warnings.warn(
                _UNEQUAL.format(self._first, items, reason, self._fix),
                GradAccumWarning,
                stacklevel=3,
            )
        self._first = self._first or items or 0


def number_of_items(micro_batch: object) -> int | None:
    """Return the number of items in a micro-batch: 0 if there is no array, None if the
    number is unknown.

    For a batch of graphs, it is the number of graphs. Otherwise it is the length of the
    arrays' first axis. If the arrays' first axes have different lengths, as in a
    time-major batch, the number is unknown.
    """
    number_of_graphs = getattr(micro_batch, "num_graphs", None)
    if isinstance(number_of_graphs, int):
        return number_of_graphs
    shapes = (_shape_of(leaf.value) for leaf in leaves_of(micro_batch))
    lengths = {int(shape[0]) for shape in shapes if len(shape)}
    if len(lengths) > 1:
        return None
    return max(lengths, default=0)


def _shape_of(value: object) -> tuple[int, ...]:
    try:
        return cast(tuple[int, ...], getattr(value, "shape", ()))
    except RuntimeError:  # torch's nested tensors have no shape.
        return ()


def epoch(
    loader: Iterable[M],
    flush: Callable[[], object],
    *,
    carry: bool = False,
    progress: bool = False,
    see: Callable[[M], object] | None = None,
) -> Epoch[M]:
    """Return an iterator over the micro-batches of a loader. It calls `flush` when the
    loader is exhausted.

    If the loop ends early, through a ``break`` or an error, the window stays open.

    Args:
        loader: yields the micro-batches.
        flush: a function that closes the open window.
        carry: if True, leave the last window open for the next pass.
        progress: if True, show a progress bar with rich.
        see: a function that is called with each micro-batch after the loop's body has
            processed it.

    Raises:
        ModuleNotFoundError: `progress` is True, and rich is not installed.
    """
    source = _with_progress(loader) if progress else loader
    return Epoch(loader, _epoch(source, None if carry else flush, see))


class Epoch(Iterator[M]):
    """Iterates over the micro-batches of one pass over a loader. Its length is the
    loader's length.
    """

    def __init__(self, loader: object, micro_batches: Iterator[M]) -> None:
        self._loader = loader
        self._micro_batches = micro_batches
        self._loops = 0
        """The number of loops over this object that have begun."""
        self._loops_at_end = 0
        """The number of loops that had begun when the pass ended; 0 until the pass
        ends.
        """

    def __iter__(self) -> Epoch[M]:
        """Return this object itself, as iterators do.

        Raises:
            UsageError: the first loop has read the whole pass, and there was already a
                second loop. A second, empty loop is allowed, because a program that
                reads a few micro-batches per loop stops at an empty loop.
        """
        self._loops += 1
        if self._loops_at_end == 1 and self._loops > 2:
            raise UsageError(
                "epoch: expected a new call for each pass over the loader; got an"
                " iterator that is already exhausted. Write `for micro_batch in"
                " opt.epoch(loader):` inside the loop over the epochs."
            )
        return self

    def __next__(self) -> M:
        try:
            return next(self._micro_batches)
        except BaseException:
            self._loops_at_end = self._loops_at_end or self._loops
            raise

    def __len__(self) -> int:
        """Return the number of micro-batches in the whole pass.

        Raises:
            TypeError: the loader has no length.
        """
        return len(self._loader)  # type: ignore[arg-type]


def _epoch(
    loader: Iterable[M],
    flush: Callable[[], object] | None,
    see: Callable[[M], object] | None,
) -> Iterator[M]:
    for micro_batch in loader:
        yield micro_batch
        if see is not None:
            see(micro_batch)
    if flush is not None:
        flush()


def _with_progress(loader: Iterable[M]) -> Iterable[M]:
    track = import_module("rich.progress").track
    total = None
    # torch's DataLoader always has a ``__len__``, but calling it raises an error if the
    # dataset has no length.
    with suppress(TypeError):
        total = len(cast(Sized, loader))
    return cast(Iterable[M], track(loader, "micro-batches", total=total))


class Window(Generic[M]):
    """The micro-batches of one window. They can be iterated over until the next window
    begins. After that, only `number`, `totals` and the length remain available.
    """

    def __init__(
        self, number: int, micro_batches: list[M], totals: Mapping[str, float]
    ) -> None:
        self.number = number
        """int: the window's number, which is the number of windows before it."""
        self.totals = totals
        """The window's totals, with the same keys as the user's `count`, such as
        ``"tokens"``. Each total is the sum of a count function's results over the
        window's micro-batches on all workers.
        """
        self._micro_batches: list[M] | None = micro_batches
        self._length = len(micro_batches)

    def __len__(self) -> int:
        """Return the number of this worker's micro-batches. It is 0 if only other
        workers have micro-batches in this window.
        """
        return self._length

    def __iter__(self) -> Iterator[M]:
        """Iterate over the window's micro-batches.

        Raises:
            UsageError: the next window has begun.
        """
        for index in range(self._length):
            if self._micro_batches is None:
                raise UsageError(
                    f"window {self.number}: expected to be iterated over before the"
                    " next window begins; got a window whose micro-batches were already"
                    " released. Use each window only in the body of the loop over the"
                    " windows."
                )
            yield self._micro_batches[index]

    def forget(self) -> None:
        """Release the micro-batches. This is called when the next window begins."""
        self._micro_batches = None


@dataclass
class Windows(Generic[M]):
    """The iterable that `gradaccum.windows` returns. Each ``for`` loop reads the loader
    from the beginning, but the numbering of the windows continues.
    """

    loader: Iterable[M]
    schedule: Schedule
    count: Mapping[str, Count[M]]
    weight: str | None
    reduce: Reduce | None
    next_number: int
    """The number of the next window."""

    def __iter__(self) -> Iterator[Window[M]]:
        loader = iter(self.loader)
        ends_by_weight = isinstance(self.schedule, UntilWeight)
        is_over = False
        """True if this worker has no more micro-batches to read. If windows are defined
        by total weight, True only if no worker has any more micro-batches.
        """
        while True:
            size = _size(self.schedule, self.next_number)
            micro_batches: list[M] = []
            totals = self._values_of([])
            while not (is_over or self._is_full(size, len(micro_batches), totals)):
                new = list(islice(loader, 1))
                values = self._values_of(new)
                if ends_by_weight:  # A single worker does not know the window's weight.
                    values = self._reduced(values)
                is_over = values[0] == 0
                totals = [
                    total + value for total, value in zip(totals, values, strict=True)
                ]
                micro_batches += new
            if not ends_by_weight:
                totals = self._reduced(totals)
            if totals[0] == 0:
                return
            by_name = dict(zip(self.count, totals[1:], strict=True))
            window = Window(self.next_number, micro_batches, by_name)
            self.next_number += 1
            yield window
            window.forget()

    def _values_of(self, micro_batches: list[M]) -> list[float]:
        """Return the number of `micro_batches` (0 or 1), followed by one total for each
        function in `self.count`, in the same order. A total is the sum of the
        function's results over `micro_batches`.
        """
        values = [float(len(micro_batches))]
        for name, function in self.count.items():
            numbers = map(function, micro_batches)
            values.append(sum(require_number(name, n, or_equal=True) for n in numbers))
        return values

    def _reduced(self, values: list[float]) -> list[float]:
        """Return the sum of `values` over all workers.

        Raises:
            ArgumentValueError: `reduce` returned a different number of values, an
                infinite value, or a value below this worker's own value. In the last
                case, `reduce` probably computes a mean instead of a sum.
        """
        if self.reduce is None:
            return values
        totals = [float(value) for value in self.reduce(list(values))]
        is_below = [
            not total >= value * (1 - _ROUNDING)
            for value, total in zip(values, totals, strict=False)
        ]
        if len(totals) != len(values) or any(is_below) or math.inf in totals:
            raise ArgumentValueError(
                f"reduce: expected a function that returns {len(values)} finite"
                " numbers, each at least as large as the corresponding number on this"
                f" worker ({values}); got {totals!r} ({type(totals).__name__}). Return"
                " the sums over all workers, in the same order, as floats."
            )
        return totals

    def _is_full(
        self, size: int | UntilWeight, micro_batches: int, totals: list[float]
    ) -> bool:
        if not isinstance(size, UntilWeight):
            return micro_batches >= size
        by_name = dict(zip(self.count, totals[1:], strict=True))
        return by_name[cast(str, self.weight)] >= cast(int, size.weight)


def _size(schedule: Schedule, number: int) -> int | UntilWeight:
    return require_steps(steps_at(schedule, number, select), number, schedule)


def windows(
    loader: Iterable[M],
    steps: object,
    count: Mapping[str, Count[M]] | None = None,
    weight: str | None = None,
    reduce: Reduce | None = None,
    *,
    start: int = 0,
) -> Windows[M]:
    """Read the micro-batches of a loader window by window, with totals that are known
    before the first forward pass.

    In ``for window in windows(loader, 4, count={"tokens": f})`` each `window` can be
    iterated over and supports ``len()``, and ``window.totals["tokens"]`` is the sum of
    ``f`` over its micro-batches. Wrap the optimizer with ``steps=None``, and call
    ``flush`` after each window. Only one window at a time is in memory.

    Args:
        loader: yields the micro-batches, of any type. All micro-batches of a window are
            read before the first of them is used, so a loader that reuses one buffer
            must yield copies.
        steps: the number of micro-batches per window. This is an int >= 1, a list of
            pairs ``(first window, steps)``, a function of the window's number (counted
            from 0), or ``until_weight(n)``. With ``until_weight(n)``, a window ends
            with the micro-batch that brings the window's weight to n or more.
        count: a mapping from names to functions of a micro-batch. Each function returns
            a finite number >= 0, or a framework's scalar. If the scalar is on a device,
            the loop waits for the device.
        weight: with ``until_weight``, the name of the count that is used as the weight.
        reduce: with several workers, a function that takes a list of floats and returns
            their sums over all workers, preferably computed in float64. It is called
            once per window, and once more at the end. With ``until_weight`` it is
            called once per micro-batch. The totals and the weight are then sums over
            all workers. Every worker must iterate over every window, even after its own
            loader is exhausted and its windows have length 0.
        start: the number of the first window. Pass it to resume a run whose `steps`
            depends on the window's number.

    Raises:
        ArgumentTypeError, ArgumentValueError: `steps` is invalid (raised immediately),
            or a function returned an invalid value (raised when a window is read).
        KeyError: `steps` is an ``until_weight(n)``, but `count` has no function with
            the name `weight`.

    Examples:
        >>> lengths = [[5, 3], [2], [7, 1, 4], [6]]  # lengths of sequences
        >>> for window in windows(lengths, 3, count={"tokens": sum, "sequences": len}):
        ...     print(len(window), dict(window.totals))
        3 {'tokens': 22.0, 'sequences': 6.0}
        1 {'tokens': 6.0, 'sequences': 1.0}
    """
    return Windows(loader, make_schedule(steps), count or {}, weight, reduce, start)
