"""The listeners of a wrapped optimizer hear of a window when the call that closed it is through, or closes another one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

from gradaccum import StepResult
from gradaccum.kit import Handle, Listener, Listeners, State

T = TypeVar("T")


class Ended(Protocol):
    """A window that has just closed."""

    @property
    def result(self) -> StepResult:
        """What its end did, in Python numbers."""


class Listening:
    """The listeners of one optimizer."""

    def __init__(self) -> None:
        self._listeners = Listeners()

    def add(self, listener: Listener) -> Handle:
        """Tell `listener` too."""
        return self._listeners.add(listener)

    def window_ended(self, before: State, window: Ended) -> None:
        """`window` has closed, and the call that closed it may go on; `before`: its state before, with the weight of all workers."""
        if self._listeners:
            self._listeners.note(window.result, weight=before.weight, micro_batches=before.micro_step)

    def tell(self) -> None:
        """Tell of the windows that have closed; `after` raises what a listener raises."""
        self._listeners.tell()

    def after(self, call: Callable[[], T]) -> T:
        """Make a `call` that may close windows, and tell of them when it is through."""
        if not self._listeners:
            return call()
        with self._listeners.settled():
            return call()


NOBODY = Listening()
"""For an optimizer that never had a listener."""
