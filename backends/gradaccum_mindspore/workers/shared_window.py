"""The events in PyNative of a window that several workers share."""

from __future__ import annotations

from collections.abc import Callable

import mindspore as ms
from mindspore import nn

from gradaccum.kit import Options, Schedule, State
from gradaccum_mindspore.compiled_window import CompiledWindow
from gradaccum_mindspore.pynative_window import PyNativeWindow
from gradaccum_mindspore.state import OF_ALL, OWN, Storage
from gradaccum_mindspore.types import Gradients
from gradaccum_mindspore.update import Update
from gradaccum_mindspore.workers.group import Joined, WorkerGroup


class CompiledEnd(nn.Cell):  # type: ignore[misc]
    """The end of a window whose workers are added up, as compiled code."""

    def __init__(self, window: CompiledWindow, update: Update) -> None:
        super().__init__(auto_prefix=False)
        self.window, self.update = window, update

    def construct(self) -> bool:
        return self.window.close_joined(self.update, False)


class SharedWindow(PyNativeWindow):
    """As `PyNativeWindow`; the end of a window and `flush` are collective.

    Args:
        storage: its Parameters.
        options: the checked options.
        compiled_window: the same window in compiled code.
        workers: those that share it.
    """

    def __init__(self, storage: Storage, options: Options, compiled_window: CompiledWindow, workers: WorkerGroup) -> None:
        super().__init__(storage, options)
        self.compiled_window, self.workers = compiled_window, workers
        self.flushing = False
        """A `flush` has begun and not ended, be it because an update raised in it."""
        self.compiled_end: Callable[[], bool] | None = None

    def add(self, gradients: Gradients, weight: float, size: Schedule, loss: float | None = None) -> State:
        self.workers.require_own_sum("gradients")
        return super().add(gradients, weight, size, loss)

    def close(self, state: State, update: Update) -> None:
        self.flushing = False
        self.end(state, update)

    def end(self, state: State, update: Update) -> Joined:
        """End the window of all workers, in this one's part; returns what came together."""
        joined = self.workers.join(state, self.flushing)
        if joined.is_open and joined.in_compiled_code:
            self.compiled(update)()
        elif joined.is_open:
            super().close(joined.state, update)
        return joined

    def compiled(self, update: Update) -> Callable[[], bool]:
        """`CompiledEnd` in the mode of the program."""
        if self.compiled_end is None:
            cell = CompiledEnd(self.compiled_window, update)
            self.compiled_end = cell if ms.get_context("mode") == ms.GRAPH_MODE else ms.jit(cell.construct)
        return self.compiled_end

    def flush(self, update: Update) -> bool:
        """End windows until all workers flush; returns whether one of them held a micro-batch.

        If the update of the window raised that all workers ended together, this makes it, and takes part in no other one.
        """
        if self.storage.held() == OF_ALL:
            joined = self.end(self.storage.pull(), update)
            if not self.flushing or joined.all_flush:
                self.flushing = False
                return True
        self.flushing, closed, all_flush = True, False, False
        while not all_flush:
            joined = self.end(self.storage.pull(), update)
            closed, all_flush = closed or joined.is_open, joined.all_flush
            if joined.is_open and not all_flush:
                self.storage.listening.between()
        self.flushing = False
        self.workers.require_same_rates()
        return closed

    def clear(self) -> None:
        super().clear()
        self.storage.hold(OWN)
