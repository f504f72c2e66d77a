"""Listeners: functions that are called with a `ClosedWindow` after each window."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from gradaccum.state import StepResult

__all__ = ["ClosedWindow", "Listener"]

# A listener receives Python numbers, so that it does not depend on a framework. A
# number that is unknown is passed as NaN.


class ClosedWindow(NamedTuple):
    """A window that has ended. The flags and the norm are the same as in the
    `gradaccum.StepResult` of the call that closed the window.
    """

    optimizer_step: int
    """The number of updates applied since the start of the run, including this window's
    update. The number does not change if the window was skipped.
    """
    applied: bool
    """True if the window closed with an update."""
    skipped: bool
    """True if the window closed without an update, because of an overflow, a norm above
    `skip_norm` or a total weight of 0.
    """
    overflow: bool
    """True if the window contained a non-finite gradient."""
    grad_norm: float
    """The global 2-norm of the window's gradient, without the loss scale and before
    clipping. It is inf if the gradient overflowed, and NaN if it was not measured.
    """
    loss_scale: float
    """The loss scale for the next window. It is 1 if there is no loss scaling."""
    weight: float
    """The sum of the weights of the window's micro-batches. If several workers share
    the window, the sum includes the micro-batches of all workers. It is NaN if it is
    unknown.
    """
    micro_batches: float
    """The number of this worker's micro-batches in the window, or NaN if it is unknown.
    """
    seconds: float
    """The wall-clock time since the previous window closed. For the first window, it is
    the time since the first listener was added.
    """
    loss: float = math.nan
    """The loss that the window would have as one large batch over all workers. It is
    NaN unless all losses are known.
    """


Listener = Callable[[ClosedWindow], object]
"""A function that is called with each closed window. Its return value is ignored."""


# The listeners of one optimizer. When a window closes, `note` only records it. `tell`
# calls the listeners later, when all other work on the window is done, but before the
# call that closed the window returns. At the end of that call, `settled` raises the
# listeners' errors. A listener that raises an error therefore cannot prevent an update,
# a change of the loss scale, or a collective operation that the other workers wait for.


_AFTER = (
    "gradaccum: a listener raised this error after the window had closed. If an"
    " update was due, it has been applied."
)


class Handle:
    """The handle that is returned when a listener is added. Its ``remove()`` removes
    the listener, as with torch's hooks.
    """

    def __init__(self, listeners: dict[int, Listener], key: int) -> None:
        self._listeners = listeners
        self._key = key

    def remove(self) -> None:
        """Remove the listener. A second call does nothing."""
        self._listeners.pop(self._key, None)


class Listeners:
    """The listeners of one optimizer, in the order in which they were added, and the
    closed windows that have not been reported yet. Copying or pickling this object
    leaves out both the listeners and the windows.
    """

    def __init__(self) -> None:
        self.added: dict[int, Listener] = {}
        """A dictionary from keys to listeners. While it is empty, closed windows need
        not be recorded.
        """
        self._keys = itertools.count()
        self._untold: list[ClosedWindow] = []
        self._failures: list[Exception] = []
        self._last_end = 0.0

    def __reduce__(self) -> tuple[type[Listeners], tuple[()]]:
        return Listeners, ()

    def add(self, listener: Listener) -> Handle:
        """Call `listener` with each window that closes from now on."""
        if not self.added:
            self._last_end = time.perf_counter()
        key = next(self._keys)
        self.added[key] = listener
        return Handle(self.added, key)

    def on_update(self, function: Callable[[], object]) -> Handle:
        """Call `function`, without arguments, after each window that closes with an
        update.
        """

        def call_if_applied(window: ClosedWindow) -> None:
            if window.applied:
                function()

        return self.add(call_if_applied)

    def note(
        self,
        result: StepResult,
        *,
        weight: float = math.nan,
        micro_batches: float = math.nan,
    ) -> ClosedWindow:
        """Record a window that has just closed, so that `tell` can report the window to
        the listeners. `result` is the result of the call that closed the window, and
        must contain Python numbers. `weight` and `micro_batches` are explained at
        `ClosedWindow`.
        """
        now = time.perf_counter()
        seconds = now - self._last_end
        self._last_end = now
        window = ClosedWindow(
            result.optimizer_step,
            result.applied,
            result.skipped,
            result.overflow,
            result.grad_norm,
            result.loss_scale,
            weight,
            micro_batches,
            seconds,
            float(result.loss),
        )
        self._untold.append(window)
        return window

    @contextmanager
    def settled(self) -> Iterator[None]:
        """Return a context manager for the code that closes windows. When its ``with``
        block ends, the listeners are called with the windows that closed inside the
        block. If the block raised an error, this error is raised. Otherwise, the
        listeners' first error, if any, is raised.
        """
        try:
            yield
        except BaseException as error:
            self.tell()
            for failure in self._taken_failures():
                error.add_note(f"gradaccum: a listener also raised {failure!r}")
            raise
        self.tell()
        failures = self._taken_failures()
        if failures:
            first, *others = failures
            first.add_note(_AFTER)
            for failure in others:
                first.add_note(f"gradaccum: another listener also raised {failure!r}")
            raise first

    def tell(self) -> None:
        """Call every listener with every window that has not been reported yet. If a
        listener raises an error, the remaining listeners are still called, and
        `settled` raises the error later.

        If one call closes several windows, the backend calls `tell` between them,
        because a listener may step a learning-rate schedule.
        """
        windows = self._untold
        self._untold = []
        for window in windows:
            for listener in [*self.added.values()]:
                try:
                    listener(window)
                except Exception as failure:
                    self._failures.append(failure)

    def _taken_failures(self) -> list[Exception]:
        failures = self._failures
        self._failures = []
        return failures
