"""A window whose micro-batches are all read before the first is run, and the pass over a loader that reads them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Generic

from gradaccum.errors import UsageError, explain
from gradaccum.schedule import Schedule, UntilWeight, require_steps
from gradaccum.transitions import select, steps_at
from gradaccum.window_counts import Counts, M, Reduce, summed


class Window(Generic[M]):
    """The micro-batches of one window. It can be iterated over again and again, until the next window is asked for.

    Its `number`, its `len` and its `totals` stay after that; the micro-batches are let go.
    """

    def __init__(self, number: int, micro_batches: list[M], totals: Mapping[str, float]) -> None:
        self.number = number
        """int: windows before it."""
        self.totals: Mapping[str, float] = MappingProxyType(dict(totals))
        """The sum of each count over the window, by name: over all workers, if there are several."""
        self._micro_batches: list[M] | None = micro_batches
        self._length = len(micro_batches)

    def __len__(self) -> int:
        """Micro-batches of this worker in it; 0 if only other workers have some."""
        return self._length

    def __iter__(self) -> Iterator[M]:
        """Iterate over its micro-batches.

        Raises:
            UsageError: another window is the current one.
        """
        return (self._at(index) for index in range(self._length))

    def __repr__(self) -> str:
        return f"Window(number={self.number}, micro_batches={self._length}, totals={dict(self.totals)})"

    def forget(self) -> None:
        """Let the micro-batches go; the loop does it where the next window begins."""
        self._micro_batches = None

    def _at(self, index: int) -> M:
        if self._micro_batches is None:
            expected, fix = "to be iterated over before the next window is asked for", "Use a window in the body of its loop."
            raise explain(UsageError, f"window {self.number}", expected=expected, found="one whose micro-batches are gone", fix=fix)
        return self._micro_batches[index]


class Windows(Generic[M]):
    """What `gradaccum.windows` returns: each ``for`` over it reads the loader anew, from its beginning. Their numbers go on."""

    def __init__(self, loader: Iterable[M], schedule: Schedule, counts: Counts[M], reduce: Reduce | None, start: int) -> None:
        self.loader, self.schedule, self.counts, self.reduce = loader, schedule, counts, reduce
        self.next_number = start
        """int: the number of the window that is given next."""

    def __iter__(self) -> Iterator[Window[M]]:
        return _Reader(self, iter(self.loader))


class _Reader(Iterator[Window[M]]):
    """One pass over the loader.

    What was read, but not given yet, survives an error of the loader, of a count or of the reduction: the next ``next`` goes on there.
    """

    def __init__(self, windows: Windows[M], loader: Iterator[M]) -> None:
        self._windows, self._loader, self._counts = windows, loader, windows.counts
        self._current: Window[M] | None = None
        self._size: int | UntilWeight | None = None
        """That of the window that is being read; None before it begins."""
        self._uncounted: list[M] = []
        """The micro-batch that was read last, until it is counted."""
        self._micro_batches: list[M] = []
        self._values = self._counts.zeros()
        """Those of the window that is being read; over all workers, if they agree on its end after each micro-batch."""
        self._exhausted = self._over = False
        """The own loader has ended; that of every worker has."""

    def __next__(self) -> Window[M]:
        if self._current is not None:
            self._current.forget()
            self._current = None
        if not self._over:
            self._read()
            totals = self._totals()
            if totals[0]:
                return self._give(totals)
        self._over = True
        raise StopIteration

    def _read(self) -> None:
        if self._size is None:
            self._size = _size(self._windows.schedule, self._windows.next_number)
        while not (self._is_full() or (self._over if self._agrees else self._exhausted)):
            self._read_one()

    @property
    def _agrees(self) -> bool:
        """Whether all workers reduce after each micro-batch: none of them alone knows the window's weight."""
        return self._windows.reduce is not None and isinstance(self._size, UntilWeight)

    def _is_full(self) -> bool:
        if isinstance(self._size, UntilWeight):
            return self._counts.weight(self._values) >= self._size.weight  # type: ignore[operator]  # `_size` made it a number.
        return self._size is not None and len(self._micro_batches) >= self._size

    def _read_one(self) -> None:
        """Read a micro-batch, if there is one, and count it; where the workers agree on the end, count those of all."""
        values = self._next_values()
        if self._agrees and self._windows.reduce is not None:
            values = summed(self._windows.reduce, values)
            self._over = values[0] == 0
        self._values = [total + value for total, value in zip(self._values, values, strict=True)]
        self._micro_batches += self._uncounted
        self._uncounted = []

    def _next_values(self) -> list[float]:
        if not (self._uncounted or self._exhausted):
            try:
                self._uncounted.append(next(self._loader))
            except StopIteration:
                self._exhausted = True
        if not self._uncounted:
            return self._counts.zeros()
        place = f"micro-batch {len(self._micro_batches)} of window {self._windows.next_number}"
        return self._counts.of(self._uncounted[0], place)

    def _totals(self) -> list[float]:
        """The values of the window that was read, over all workers. A worker whose loader has ended takes part with zeros."""
        reduce = self._windows.reduce
        return self._values if reduce is None or self._agrees else summed(reduce, self._values)

    def _give(self, totals: list[float]) -> Window[M]:
        self._current = Window(self._windows.next_number, self._micro_batches, self._counts.totals(totals))
        self._size, self._micro_batches, self._values = None, [], self._counts.zeros()
        self._windows.next_number += 1
        return self._current


def _size(schedule: Schedule, number: int) -> int | UntilWeight:
    return require_steps(steps_at(schedule, number, select), number, schedule)
