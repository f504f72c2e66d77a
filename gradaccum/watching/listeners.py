"""The listeners of one optimizer: they hear of a window after everything about it is settled, and none can undo it.

A window that closes is only noted (`note`). The listeners are told when all about it is settled (`tell`), at the latest as the last act of
the call that closed it (`settled`), which raises what they raised. So a listener that raises cannot lose an update, the scale's move or
another worker's part in a collective; its error still reaches the caller.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager

from gradaccum.errors import ArgumentTypeError, explain
from gradaccum.result import StepResult
from gradaccum.watching.window import ClosedWindow, Listener

_AFTER = "gradaccum: a listener raised this after the window had closed; the update, if one was due, is made."


class Handle:
    """What adding a listener gives: ``remove()`` takes it off again, once or more often. torch's hooks have the same."""

    def __init__(self, listeners: dict[int, Listener], key: int) -> None:
        self._listeners, self._key = listeners, key

    def remove(self) -> None:
        """The listener hears no more."""
        self._listeners.pop(self._key, None)


class Listeners:
    """Who listens, in the order of adding, and the windows that they have not heard of. A copy or a pickle has none: it is another run."""

    def __init__(self) -> None:
        self._listeners: dict[int, Listener] = {}
        self._keys = itertools.count()
        self._untold: list[ClosedWindow] = []
        self._failures: list[Exception] = []
        self._last_end = 0.0

    def __bool__(self) -> bool:
        return bool(self._listeners)

    def __reduce__(self) -> tuple[type[Listeners], tuple[()]]:
        return Listeners, ()

    def add(self, listener: Listener) -> Handle:
        """Call `listener` with each window that closes from now on.

        Raises:
            ArgumentTypeError: it cannot be called.
        """
        if not callable(listener):
            fix = "Write for example opt.add_listener(print)."
            raise explain(ArgumentTypeError, "listener", expected="a function of one ClosedWindow", got=listener, fix=fix)
        if not self._listeners:
            self._last_end = time.perf_counter()
        key = next(self._keys)
        self._listeners[key] = listener
        return Handle(self._listeners, key)

    def note(
        self, result: StepResult, *, weight: float = math.nan, micro_batches: float = math.nan, loss: float | None = None
    ) -> ClosedWindow:
        """A window has closed; `result`, in Python numbers, is its end's. A `loss` that is given stands in the place of the result's."""
        now = time.perf_counter()
        seconds, self._last_end = now - self._last_end, now
        loss = float(result.loss) if loss is None else loss
        said = result.optimizer_step, result.applied, result.skipped, result.overflow, result.grad_norm, result.loss_scale
        window = ClosedWindow(*said, weight, micro_batches, seconds, loss, float(result.noise_scale))
        self._untold.append(window)
        return window

    @contextmanager
    def settled(self) -> Iterator[None]:
        """Inside, windows may close; at its end the listeners hear of them. An error of the block itself goes before a listener's."""
        try:
            yield
        except BaseException as error:
            for failure in self._told():
                error.add_note(f"gradaccum: a listener raised as well: {failure!r}")
            raise
        _raise(self._told())

    def tell(self) -> None:
        """Call every listener with every window that it has not heard of; `settled` raises what they raise.

        A call that closes several windows tells of each before the next one, as a listener may move a schedule.
        """
        untold, self._untold = self._untold, []
        calls = [(listener, window) for window in untold for listener in self._listeners.values()]
        self._failures += [failure for listener, window in calls if (failure := _failure(listener, window)) is not None]

    def _told(self) -> list[Exception]:
        self.tell()
        failures, self._failures = self._failures, []
        return failures


def _failure(listener: Listener, window: ClosedWindow) -> Exception | None:
    try:
        listener(window)
    except Exception as failure:
        return failure
    return None


def _raise(failures: list[Exception]) -> None:
    """Raise the first of them; its notes tell the others."""
    if failures:
        first, *others = failures
        first.add_note(_AFTER)
        for other in others:
            first.add_note(f"gradaccum: another listener raised {other!r}")
        raise first
