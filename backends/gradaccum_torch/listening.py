"""What the listeners of a wrapped optimizer hear: gathered while its window is open, told when the call that closed it is through.

A loss stays on its device until the window ends. Without a listener nothing is kept, and nothing waits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

from torch import Tensor

from gradaccum import StepResult
from gradaccum.kit import Handle, Listener, Listeners, Losses, Reduction, State

T = TypeVar("T")


class Ended(Protocol):
    """A window that has just closed."""

    @property
    def result(self) -> StepResult:
        """What its end did, in Python numbers."""


class Listening:
    """The listeners of one optimizer and the losses of its open window.

    Args:
        reduction: the optimizer's.
    """

    def __init__(self, reduction: Reduction) -> None:
        self._listeners, self._losses = Listeners(), Losses(reduction)

    def add(self, listener: Listener) -> Handle:
        """Tell `listener` too."""
        return self._listeners.add(listener)

    def hear(self, loss: Tensor, weight: float) -> None:
        """A loss of the micro-batch under way, shape ``()``."""
        if self._listeners and loss.ndim == 0:
            # A copy: a captured CUDA graph writes the next loss into the same memory.
            self._losses.tell(loss.detach().clone(), weight)

    def counted(self, *, dropped: bool) -> None:
        """The micro-batch was counted; `dropped`: it added nothing. Its window may close after this."""
        if self._listeners:
            self._losses.count(dropped=dropped)

    def drop(self) -> None:
        """The micro-batch under way was cleared."""
        self._losses.drop()

    def forget(self) -> None:
        """The window was discarded."""
        self._losses.forget()

    def window_ended(self, before: State, window: Ended) -> None:
        """`window` has closed, and the call that closed it may go on; `before`: its state before, with the weight of all workers."""
        if self._listeners:
            loss = self._losses.of_window(before.micro_step)
            self._listeners.note(window.result, weight=before.weight, micro_batches=before.micro_step, loss=loss)

    def after(self, call: Callable[[], T]) -> T:
        """Make a `call` that may close windows, and tell of them when it is through."""
        if not self._listeners:
            return call()
        with self._listeners.settled():
            return call()


NOBODY = Listening("mean")
"""For an optimizer that never had a listener."""
