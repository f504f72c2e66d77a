"""A callback for `mindspore.train.Model.train`: listeners hear of each window that closes.

MindSpore compiles the optimizer's call, where no Python runs, so the counters are read after each step. They tell of a window that closed
also where another event came after it.
"""

from __future__ import annotations

import math

from mindspore.train import Callback, RunContext

from gradaccum import ArgumentTypeError, UsageError
from gradaccum.kit import Listener, Listeners, State, explain
from gradaccum_mindspore.callbacks import FlushAtEpochEnd
from gradaccum_mindspore.optimizer import AccumulatingOptimizer


class WatchWindows(Callback):  # type: ignore[misc]
    """Call `listeners` with a `gradaccum.watching.ClosedWindow` after each step that closed a window.

    Put it before `FlushAtEpochEnd`: a window that this one closes is told at the end of its epoch. In each step it waits for the device, to
    read the counters. ``weight`` is NaN: what the last micro-batch weighed is nowhere kept; so is ``loss``, unless the optimizer is
    told all losses of the window, as by `gradaccum_mindspore.TrainOneStepCell`. In a loop of your own `gradaccum.Watch` takes both.

    Args:
        optimizer: the wrapped optimizer.
        listeners: functions of one window, such as a `gradaccum.watching.JsonLines`.

    Raises:
        ArgumentTypeError: `optimizer` is not wrapped, or a listener cannot be called.
    """

    def __init__(self, optimizer: AccumulatingOptimizer, *listeners: Listener) -> None:
        super().__init__()
        if not isinstance(optimizer, AccumulatingOptimizer):
            found, fix = f"an object of type {type(optimizer).__name__}", "Write WatchWindows(gradaccum.wrap(optimizer, steps=4), print)."
            raise explain(ArgumentTypeError, "optimizer", expected="the wrapped optimizer", found=found, fix=fix)
        self.optimizer = optimizer
        self.listeners = Listeners()
        for listener in listeners:
            self.listeners.add(listener)
        self.seen: State | None = None

    def on_train_begin(self, run_context: RunContext) -> None:
        """Look at the counters as they are.

        Raises:
            UsageError: `FlushAtEpochEnd` stands before this callback and would hide a window; or the data goes through a sink.
        """
        run = run_context.original_args()
        callbacks = run.list_callback
        if any(isinstance(callback, FlushAtEpochEnd) for callback in callbacks[: callbacks.index(self)]):
            fix = "Write callbacks=[WatchWindows(optimizer, print), FlushAtEpochEnd(optimizer), ...]."
            raise explain(UsageError, "callbacks", expected="WatchWindows before FlushAtEpochEnd", found="the other order", fix=fix)
        if run.get("dataset_sink_mode"):
            found, fix = "steps of a sink, which Python does not see", "Write model.train(..., dataset_sink_mode=False)."
            raise explain(UsageError, "dataset_sink_mode", expected="False beside WatchWindows", found=found, fix=fix)
        self.seen = self.optimizer.storage.pull()

    def on_train_step_end(self, run_context: RunContext) -> None:
        """Tell of the window that the step closed."""
        self._look(micro_batches=1)

    def on_train_epoch_end(self, run_context: RunContext) -> None:
        """Tell of the window that the epoch's last step left open, if it was flushed."""
        self._look(micro_batches=0)

    def on_train_end(self, run_context: RunContext) -> None:
        """Tell of the window that was flushed last."""
        self._look(micro_batches=0)

    def _look(self, micro_batches: int) -> None:
        """Compare the counters with those of the last look, since which so many micro-batches came in."""
        before, state = self.seen, self.optimizer.storage.pull()
        self.seen = state
        if before is None or _ended(state) == _ended(before):
            return
        applied = state.optimizer_step > before.optimizer_step
        result = self.optimizer.result._replace(applied=applied, skipped=not applied)
        known = state.micro_step == 0 and _ended(state) == _ended(before) + 1
        with self.listeners.settled():
            self.listeners.note(result, micro_batches=before.micro_step + micro_batches if known else math.nan)


def _ended(state: State) -> int:
    """How many windows have closed so far."""
    ended: int = state.optimizer_step + state.skipped_windows
    return ended
