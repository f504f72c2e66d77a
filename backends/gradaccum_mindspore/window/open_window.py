"""A warning of a window that nobody closes: at the end of the program, or as the next
epoch begins.

The micro-batches of a window that is open when the program ends are in no update. That
is meant where the window was saved, or where a loop carries its windows over. It is no
news where an exception ended the program, and usual in a test.
"""

from __future__ import annotations

import atexit
import sys
import warnings
from typing import Any, Protocol
from weakref import WeakSet

from mindspore import Parameter

from gradaccum import GradAccumWarning
from gradaccum.kit import State

AT_THE_END = (
    "gradaccum: the program ended in an open window, whose micro-batches ({}) are in no"
    " update. Call optimizer.flush() after the last one; in Model.train write"
    " callbacks=[FlushAtEpochEnd(optimizer)]. If they are not to count, call"
    " optimizer.discard()."
)
IN_THE_NEXT_EPOCH = (
    "gradaccum: an epoch begins in the open window of one that was left early"
    " (micro-batches: {}). Call optimizer.flush() where you leave the loop, or write"
    " optimizer.epoch(loader, carry=True)."
)


class Window(Protocol):
    """The window that is looked at."""

    micro_step: Parameter

    def pull(self) -> State:
        """Return its state in Python numbers."""


class OpenWindowWarning:
    """One optimizer's open window, as far as its user knows of it."""

    def __init__(self, window: Window) -> None:
        self.window = window
        self.known_state = window.pull()
        """The state that was saved or loaded last."""
        self.in_epoch = False
        """An epoch has begun and not ended, as far as anyone knows."""
        self.silent = False
        """The user carries windows over, or has been warned."""
        self.init_data = window.micro_step.init_data
        # MindSpore has no hook for saving. It calls this method of every Parameter
        # that it saves, and otherwise only before it runs one for the first time.
        window.micro_step.init_data = self.init_micro_step
        OF_ALL_OPTIMIZERS.add(self)

    def init_micro_step(self, *args: Any, **named: Any) -> Parameter:
        self.note_state()
        return self.init_data(*args, **named)

    def note_state(self) -> None:
        """Note that the state is being saved, or was loaded."""
        self.known_state = self.window.pull()

    def epoch_begins(self, carry: bool) -> None:
        self.silent = self.silent or carry
        if self.in_epoch:
            self.warn_if_open(IN_THE_NEXT_EPOCH)
        self.in_epoch = True

    def warn_if_open(self, message: str) -> None:
        """Warn, once, of an open window that was neither saved nor loaded."""
        if self.silent:
            return
        state = self.window.pull()
        if state.micro_step and state != self.known_state:
            self.silent = True
            warnings.warn(
                message.format(state.micro_step), GradAccumWarning, stacklevel=4
            )


OF_ALL_OPTIMIZERS: WeakSet[OpenWindowWarning] = WeakSet()


@atexit.register
def warn_at_the_end() -> None:
    if hasattr(sys, "last_value") or "pytest" in sys.modules:
        return
    for warning in OF_ALL_OPTIMIZERS:
        warning.warn_if_open(AT_THE_END)
