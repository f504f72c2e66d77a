"""The listeners of a wrapped optimizer hear of each window on the host, and schedulers follow its updates.

Compiled code can call nobody. The counters tell what it closed: the training cell, the optimizer and ``flush`` look at them after each call
from Python, as does ``result``. One window may close between two looks; its update stands until the next one closes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol
from weakref import WeakSet

from gradaccum import StepResult, UsageError
from gradaccum.kit import Handle, Listener, Listeners, State, explain


class Counted(Protocol):
    """The state of the window that is listened to."""

    def pull(self) -> State:
        """The state in Python numbers."""

    def result(self) -> StepResult:
        """What the last event did."""


class Follower(Protocol):
    """A scheduler that moves once per update."""

    def follow(self) -> None:
        """Move if an update was applied since the last move."""

    def loaded(self) -> None:
        """A checkpoint was loaded, which is no update."""


class Listening:
    """The listeners and the schedulers of one optimizer."""

    def __init__(self, storage: Counted) -> None:
        self.storage, self.listeners = storage, Listeners()
        self.schedulers: WeakSet[Follower] = WeakSet()
        self.seen = storage.pull()
        """At the last look."""

    def add(self, listener: Listener) -> Handle:
        """Tell `listener` too."""
        if not self.listeners:
            self.seen = self.storage.pull()
        return self.listeners.add(listener)

    def loaded(self) -> None:
        """A checkpoint was loaded: its windows closed in another run."""
        self.seen = self.storage.pull()
        for scheduler in self.schedulers:
            scheduler.loaded()

    def window_ended(self, before: State) -> None:
        """Note the window that the host has just closed; `before`: its state before, with the weight of all workers."""
        if self.listeners:
            self.seen = self.storage.pull()
            self.listeners.note(self.storage.result(), weight=before.weight, micro_batches=before.micro_step)

    def look(self, micro_batches: float = math.nan) -> None:
        """Note the window that compiled code closed since the last look, in which it took in so many micro-batches.

        Raises:
            UsageError: it closed several. The listeners cannot hear of one at a time any more.
        """
        if not self.listeners:
            return
        before, self.seen = self.seen, self.storage.pull()
        closed = _closed(self.seen) - _closed(before)
        if closed > 1:
            expected, found = "optimizer.result to be read after each compiled step", f"{closed} windows that closed since the last look"
            fix = "Read it, train with gradaccum_mindspore.TrainOneStepCell, or take callbacks=[WatchWindows(optimizer)] in Model.train."
            raise explain(UsageError, "listeners", expected=expected, found=found, fix=fix)
        if closed == 1:
            applied = self.seen.optimizer_step > before.optimizer_step
            held = before.micro_step + micro_batches if self.seen.micro_step == 0 else math.nan
            self.listeners.note(self.storage.result()._replace(applied=applied, skipped=not applied), micro_batches=held)

    def tell(self, micro_batches: float = math.nan) -> None:
        """`look`, and tell what is noted."""
        if self.listeners:
            with self.listeners.settled():
                self.look(micro_batches)

    def after(self, micro_batches: int, call: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """Make a `call` from Python, which takes in so many micro-batches and may close windows, and tell of them."""
        if not self.listeners:
            return call(*arguments, **named)
        with self.listeners.settled():
            self.look()
            self.listeners.tell()
            answer = call(*arguments, **named)
            self.look(micro_batches)
        return answer

    def between(self) -> None:
        """The call closes another window. What the user's loop does after each window on the other workers is done here."""
        self.look(0)
        self.listeners.tell()
        for scheduler in self.schedulers:
            scheduler.follow()


def _closed(state: State) -> int:
    closed: int = state.optimizer_step + state.skipped_windows
    return closed
