"""Listeners of closed windows: functions of a `ClosedWindow`, called after each
window.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from gradaccum.state import StepResult

__all__ = ["ClosedWindow", "Listener"]

# What a listener hears of a window: Python numbers, so that it needs no framework. What
# nobody told is NaN.


class ClosedWindow(NamedTuple):
    """One window, after its end. The flags and the norm are those of its
    `gradaccum.StepResult`.
    """

    optimizer_step: int
    """Updates applied since the start, this window's included: the same number again if
    the window was skipped.
    """
    applied: bool
    """It closed with an update."""
    skipped: bool
    """It closed without one (overflow, norm above `skip_norm`, or no weight)."""
    overflow: bool
    """It held a non-finite gradient."""
    grad_norm: float
    """Global 2-norm of its true gradient, before clipping; inf if it overflowed, NaN if
    not measured.
    """
    loss_scale: float
    """The scale for the losses of the next window; 1 when unused."""
    weight: float
    """Sum of the weights in it, of all workers where the optimizer knows them."""
    micro_batches: float
    """This worker's micro-batches in it, an int."""
    seconds: float
    """Time on the clock since the window before it closed; for the first one, since
    listening began.
    """
    loss: float = math.nan
    """Its loss as one large batch, of all workers, if all losses were told."""


Listener = Callable[[ClosedWindow], object]
"""Called with each closed window; what it returns is dropped."""


# The listeners of one optimizer. A window that closes is only noted (`note`). The
# listeners are told when all about it is settled (`tell`), at the latest as the last
# act of the call that closed it (`settled`), which raises what they raised. So a
# listener that raises cannot lose an update, the scale's move or another worker's part
# in a collective.


_AFTER = (
    "gradaccum: a listener raised this after the window had closed; the update, if one"
    " was due, is made."
)


class Handle:
    """The handle of an added listener; ``remove()`` removes it, as with torch's
    hooks.
    """

    def __init__(self, listeners: dict[int, Listener], key: int) -> None:
        self._listeners = listeners
        self._key = key

    def remove(self) -> None:
        """Remove the listener; more than once is harmless."""
        self._listeners.pop(self._key, None)


class Listeners:
    """The listeners in order, and the windows not yet reported. A copy or a pickle has
    none.
    """

    def __init__(self) -> None:
        self.added: dict[int, Listener] = {}
        """The listeners by key; empty, the window need not report."""
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
        """Record a closed window from its `result`, in Python numbers."""
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
        """Report the windows that closed inside the block at its end. An error of the
        block comes before a listener's.
        """
        try:
            yield
        except BaseException as error:
            self.tell()
            for failure in self._taken_failures():
                error.add_note(f"gradaccum: a listener raised as well: {failure!r}")
            raise
        self.tell()
        failures = self._taken_failures()
        if failures:
            first, *others = failures
            first.add_note(_AFTER)
            for failure in others:
                first.add_note(f"gradaccum: another listener raised {failure!r}")
            raise first

    def tell(self) -> None:
        """Call every listener with every window not yet reported; `settled` raises what
        they raise.

        A call that closes several windows reports each before the next, as a listener
        may move a schedule.
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
