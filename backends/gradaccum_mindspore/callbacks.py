"""Callbacks for `mindspore.train.Model.train`: one closes the short window at the end of an epoch, one tells listeners of each window."""

from __future__ import annotations

from mindspore.train import Callback, ModelCheckpoint, RunContext

from gradaccum import ArgumentTypeError, UsageError
from gradaccum.kit import Handle, Listener, Listeners, explain
from gradaccum_mindspore.optimizer import AccumulatingOptimizer


class FlushAtEpochEnd(Callback):  # type: ignore[misc]
    """Close the open window in the last step of each epoch, so that no window reaches from one epoch into the next.

    The update divides by the weight that the window holds. Put this callback before callbacks that save checkpoints: they save at the end
    of a step, where this one flushes. `mindspore.train.Model.fit` validates after it. With a
    ``sink_size`` MindSpore's epoch is that many steps, where the data goes through a sink; on a CPU it does not, and the epoch is the data.

    Args:
        optimizer: the wrapped optimizer.

    Raises:
        ArgumentTypeError: `optimizer` is not wrapped.
    """

    def __init__(self, optimizer: AccumulatingOptimizer) -> None:
        super().__init__()
        self.optimizer = wrapped(optimizer)
        self.steps: int | None = None
        """Of an epoch whose data goes through no sink; ``batch_num`` is the ``sink_size`` there too, if one was given."""
        self.flushed = False
        """In this epoch. Where workers share their windows each flushes once in an epoch, whatever it holds, as `flush` is collective."""

    def on_train_begin(self, run_context: RunContext) -> None:
        """Raise `UsageError` if a `mindspore.train.ModelCheckpoint` stands before this callback: it would save without the tail."""
        run = run_context.original_args()
        self.steps = None if run.get("dataset_sink_mode") else run.train_dataset.get_dataset_size()
        callbacks = run.list_callback
        if any(isinstance(callback, ModelCheckpoint) for callback in callbacks[: callbacks.index(self)]):
            expected, found = "FlushAtEpochEnd before ModelCheckpoint, which saves as the step ends", "the other order"
            raise explain(UsageError, "callbacks", expected=expected, found=found, fix="Write callbacks=[FlushAtEpochEnd(optimizer), ...].")

    def on_train_epoch_begin(self, run_context: RunContext) -> None:
        """Begin an epoch."""
        self.flushed = False

    def on_train_step_end(self, run_context: RunContext) -> None:
        """Flush, if the epoch ends with this step."""
        run = run_context.original_args()
        if run.cur_step_num % (self.steps or run.batch_num) == 0:
            self.optimizer.flush()
            self.flushed = True

    def on_train_epoch_end(self, run_context: RunContext) -> None:
        """Flush the window that an epoch left open when it was stopped early."""
        shared = self.optimizer.compiled_window.workers is not None
        if not self.flushed if shared else self.optimizer.storage.micro_step.item() > 0:
            self.optimizer.flush()


class WatchWindows(Callback):  # type: ignore[misc]
    """Call `listeners` with a `gradaccum.watching.ClosedWindow` after each step that closed a window.

    While `Model.train` runs they are listeners of the optimizer, as by its ``add_listener``. The callback looks for a closed window after
    each step, because the cell that `Model` builds of a network, a loss and an optimizer is compiled whole. Put it before
    `FlushAtEpochEnd`. In each step it waits for the device. ``weight`` is NaN where compiled code closes the window; so is ``loss``,
    unless the optimizer is told all losses of the window, as by `gradaccum_mindspore.TrainOneStepCell`.

    Args:
        optimizer: the wrapped optimizer.
        listeners: functions of one window, such as a `gradaccum.watching.JsonLines`.

    Raises:
        ArgumentTypeError: `optimizer` is not wrapped, or a listener cannot be called.
    """

    def __init__(self, optimizer: AccumulatingOptimizer, *listeners: Listener) -> None:
        super().__init__()
        self.optimizer, self.listeners = wrapped(optimizer), listeners
        self.handles: list[Handle] = []
        for listener in listeners:
            Listeners().add(listener)

    def on_train_begin(self, run_context: RunContext) -> None:
        """Begin to listen.

        Raises:
            UsageError: the data goes through a sink.
        """
        if run_context.original_args().get("dataset_sink_mode"):
            found, fix = "steps of a sink, which Python does not see", "Write model.train(..., dataset_sink_mode=False)."
            raise explain(UsageError, "dataset_sink_mode", expected="False beside WatchWindows", found=found, fix=fix)
        self.on_train_end(run_context)  # where the last training raised
        self.handles = [self.optimizer.add_listener(listener) for listener in self.listeners]

    def on_train_step_end(self, run_context: RunContext) -> None:
        """Tell of the window that the step closed."""
        self.optimizer.storage.listening.tell(micro_batches=1)

    def on_train_end(self, run_context: RunContext) -> None:
        """Listen no more."""
        for handle in self.handles:
            handle.remove()


def wrapped(optimizer: object) -> AccumulatingOptimizer:
    """`optimizer`; raises `ArgumentTypeError` if it is not wrapped."""
    if isinstance(optimizer, AccumulatingOptimizer):
        return optimizer
    found, fix = f"an object of type {type(optimizer).__name__}", "Pass what gradaccum.wrap(optimizer, steps=4) returned."
    raise explain(ArgumentTypeError, "optimizer", expected="the wrapped optimizer", found=found, fix=fix)
