"""Objects that observe a window without changing it: they record its loss, call its
listeners and warn about common mistakes. The updates are the same without these
objects.
"""

from __future__ import annotations

import atexit
import math
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias
from weakref import WeakSet

import numpy as np
from mindspore import Tensor, nn, ops

from gradaccum import GradAccumWarning, UsageError, kit
from gradaccum.kit import Fields, Handle, Listener, Listeners, Options, State
from gradaccum_mindspore.gradient_sum import (
    DType,
    hidden_parameter,
    where,
    write_numbers,
)
from gradaccum_mindspore.mindspore_private import call_after

OPEN_AT_THE_END = (
    "gradaccum: the program ended with an open window (micro-batches: {}), so these"
    " micro-batches were not used in any update. Call optimizer.flush() after the last"
    " micro-batch, or pass callbacks=[FlushAtEpochEnd(optimizer)] to Model.train. To"
    " drop the micro-batches, call optimizer.discard()."
)
OPEN_IN_THE_NEXT_EPOCH = (
    "gradaccum: a new epoch begins, but a window is still open (micro-batches: {}),"
    " because an earlier loop ended early. Call optimizer.flush() where you leave"
    " the loop, or write optimizer.epoch(loader, carry=True)."
)


class Extension:
    """The base class of objects that observe the windows of a wrapped optimizer. Its
    methods are called from Python, never from compiled code.
    """

    def micro_batch_given(self) -> None:
        """Called when Python code passes a micro-batch to the optimizer, before the
        window changes.
        """

    def window_closed(self, state: State) -> None:
        """Called after a `PyNativeWindow` has closed a window. It is not called if a
        compiled training step closes the window. `state` is the state from before the
        window was closed, but its field `weight` contains the total weight over all
        workers.
        """

    def state_loaded(self) -> None:
        """Called after a checkpoint has been loaded into the Parameters that store the
        state.
        """


# A window's loss is computed from the weighted sum of its micro-batches' losses.
# Nothing is written for a micro-batch without a loss. The total weight of the
# micro-batches with a loss is stored next to the sum. If this total differs from the
# window's weight when the window ends, the window's loss is NaN.


LOSS = "loss"
"""The last part of the name of the Parameter that stores the losses."""
NO_LOSS = (0.0, 0.0, math.nan)
Losses: TypeAlias = Sequence[float]
"""Three numbers: the sum of the open window's losses, the total weight of the
micro-batches with a loss, and the loss of the last closed window.
"""


class WindowLoss(nn.Cell):  # type: ignore[misc]
    """The loss of each window, computed as if the window were one large batch. The loss
    is NaN unless all micro-batches of the window were passed with their losses.

    MindSpore compiles the methods whose names begin with ``compiled_``. They do not
    write Parameters, because the compiler drops an ``if`` whose condition comes from a
    function that writes Parameters. Instead they return the new values, and the window
    writes them.
    """

    def __init__(self, prefix: str, options: Options, float_dtype: DType) -> None:
        super().__init__(auto_prefix=False)
        self.options = options._replace(steps=None)
        self.float_dtype = float_dtype
        self.loss = hidden_parameter(Tensor(NO_LOSS, float_dtype), f"{prefix}.{LOSS}")
        """The Parameter that stores the losses of the windows (see `Losses`)."""
        self.zero = Tensor(0.0, float_dtype)
        self.nan = Tensor(math.nan, float_dtype)

    def read(self) -> Losses:
        losses: Losses = self.loss.tolist()
        return losses

    def write(self, losses: Losses) -> None:
        if np.array_equal(self.read(), losses, equal_nan=True):
            return
        write_numbers(self.loss, losses)

    @property
    def value(self) -> float:
        """The loss of the last closed window."""
        return self.read()[2]

    def add(self, loss: float, weight: float, is_added: bool) -> None:
        """Add a micro-batch's loss to the stored losses if the micro-batch's gradient
        was added to the window.
        """
        total, weight_with_loss, value = self.read()
        total = kit.add_loss(total, loss, weight, is_added, self.options, kit.select)
        if is_added:
            weight_with_loss += weight
        self.write((total, weight_with_loss, value))

    def after_window(self, state: State, ending: State, options: Options) -> Losses:
        """Return the three numbers of `Losses` to store when a window is closed: two
        zeros for the next window, and the loss of the closed window. With the reduction
        ``"sum"`` in `options`, this loss is the sum in `self.loss`. With any other
        reduction, the sum is divided by ``ending.weight``.

        - `state`: the state at the end of the window. The loss is NaN if the total
          weight of the micro-batches with a loss differs from ``state.weight``.
        - `ending`: normally the same as `state`. If the user passed a denominator to
          ``flush``, the weight in `ending` is the denominator (see
          `kit.with_denominator`).
        - `options`: the optimizer's options, or the options from
          `kit.with_denominator`.
        """
        total, weight_with_loss, _ = self.read()
        if weight_with_loss != state.weight:
            total = math.nan
        return 0.0, 0.0, kit.window_loss(total, ending, options, kit.select)

    def after_discard(self) -> Losses:
        return 0.0, 0.0, self.value

    def compiled_parts(
        self, loss: Tensor, weight: Tensor, is_added: Tensor | None
    ) -> Tensor:
        """Return the three numbers that one micro-batch adds to the numbers in
        `self.loss`: its weighted loss, its weight, and 0. All three numbers are 0 if
        `is_added` is false, because the micro-batch's gradient is then not added to the
        window either. Pass None as `is_added` if the gradient is certainly added.
        """
        part = kit.contribution(weight, self.options) * loss
        parts = ops.stack((part, weight, self.zero))
        if is_added is None:
            return parts
        return where(is_added, parts, ops.zeros_like(parts))

    def compiled_total(self, weight: Tensor) -> Tensor:
        losses = self.loss.value()
        return where(losses[1] == weight, losses[0], self.nan)

    def compiled_after_window(self, state: Fields) -> Tensor:
        total = self.compiled_total(state[3])
        loss = kit.window_loss(total, state, self.options, where)
        return ops.stack((self.zero, self.zero, loss.astype(self.float_dtype)))

    def compiled_with_total(self, total: Tensor, weight: Tensor) -> Tensor:
        """Return the three numbers of `Losses`: `total` as the sum of the open window's
        losses, `weight` as the total weight of the micro-batches with a loss, and the
        stored loss of the last closed window.
        """
        return ops.stack((total, weight, self.loss.value()[2]))


# Compiled code cannot call listeners. So Python compares the number of closed windows
# before and after each call of compiled code. This works only if at most one window
# closes between two comparisons.


class ListenerCalls(Extension):
    """Calls the listeners of one wrapped optimizer. `windows` is the optimizer's
    `Storage`.
    """

    def __init__(self, windows: Any) -> None:
        self.windows = windows
        self.listeners = Listeners()
        self.last_state = windows.read()
        """The state when this object last checked whether compiled code had closed a
        window.
        """

    def add(self, listener: Listener) -> Handle:
        self.begin()
        return self.listeners.add(listener)

    def on_update(self, function: Callable[[], object]) -> Handle:
        self.begin()
        return self.listeners.on_update(function)

    def begin(self) -> None:
        if not self.listeners.added:
            self.last_state = self.windows.read()

    def state_loaded(self) -> None:
        self.last_state = self.windows.read()

    def window_closed(self, state: State) -> None:
        if self.listeners.added:
            self.last_state = self.windows.read()
            self.listeners.note(
                self.windows.result(),
                weight=state.weight,
                micro_batches=state.micro_step,
            )

    def note_compiled(self, micro_batches: float = math.nan) -> None:
        """Check whether compiled code has closed a window since the last check. If so,
        record the window for the listeners. `micro_batches` is the number of
        micro-batches since the last check.
        """
        if not self.listeners.added:
            return
        before = self.last_state
        state = self.windows.read()
        self.last_state = state
        windows = closed_windows(state) - closed_windows(before)
        if windows > 1:
            raise missed_windows_error(windows)
        if windows == 1:
            was_applied = state.optimizer_step > before.optimizer_step
            if state.micro_step == 0:
                micro_batches += before.micro_step
            else:
                micro_batches = math.nan
            result = self.windows.result()._replace(
                applied=was_applied, skipped=not was_applied
            )
            self.listeners.note(result, micro_batches=micro_batches)

    def report(self, micro_batches: float) -> None:
        """Call the listeners if compiled code has closed a window since the last check.
        `micro_batches` is the number of micro-batches since the last check.
        """
        with self.listeners.settled():
            self.note_compiled(micro_batches)

    def around(self, micro_batches: int, call: Callable[[], Any]) -> Any:
        """Run `call`, which adds `micro_batches` micro-batches, and call the listeners
        for each window that closes. Return the result of `call`.
        """
        if not self.listeners.added:
            return call()
        with self.listeners.settled():
            self.note_compiled()
            self.listeners.tell()
            answer = call()
            self.note_compiled(micro_batches)
        return answer

    def between_windows(self) -> None:
        """Call the listeners after ``flush`` has closed one window and before ``flush``
        closes another.
        """
        self.note_compiled(0)
        self.listeners.tell()


def closed_windows(state: State) -> int:
    windows: int = state.optimizer_step + state.skipped_windows
    return windows


def missed_windows_error(windows: int) -> UsageError:
    return UsageError(
        "listeners: expected optimizer.result to be read after each compiled step; got"
        f" {windows} windows that closed since the last read. Read optimizer.result"
        " after each step, train with gradaccum_mindspore.TrainOneStepCell, or pass"
        " callbacks=[FlushAtEpochEnd(optimizer)] to Model.train."
    )


# If a window is open when the program ends, its micro-batches are not used in any
# update. This is intended if the window was saved in a checkpoint, or if a loop uses
# ``carry=True``. No warning is issued if an exception ended the program, or if the
# program runs under pytest, because open windows are common in tests.


class OpenWindowWarning(Extension):
    """Warns once if a window is still open when the program ends or when the next epoch
    begins.
    """

    def __init__(self, windows: Any) -> None:
        self.windows = windows
        self.known_state = windows.read()
        """The state that was last saved in, or loaded from, a checkpoint."""
        self.in_epoch = False
        """True if the iteration over a loader has started but has not reached the
        loader's end.
        """
        self.is_silent = False
        """True if this object issues no more warnings, because it has already warned
        once, or because the user passed ``carry=True`` to ``optimizer.epoch`` to leave
        windows open on purpose.
        """
        call_after(windows.micro_step, "init_data", self.state_loaded)
        OPEN_WINDOW_WARNINGS.add(self)

    def state_loaded(self) -> None:
        self.known_state = self.windows.read()

    def epoch_begins(self, carry: bool) -> None:
        self.is_silent = self.is_silent or carry
        if self.in_epoch:
            self.warn_if_open(OPEN_IN_THE_NEXT_EPOCH)
        self.in_epoch = True

    def warn_if_open(self, message: str) -> None:
        """Warn if a window is open and its state differs from the state that was last
        saved or loaded.
        """
        if self.is_silent:
            return
        state = self.windows.read()
        if state.micro_step > 0 and state != self.known_state:
            self.is_silent = True
            text = message.format(state.micro_step)
            warnings.warn(text, GradAccumWarning, stacklevel=4)


OPEN_WINDOW_WARNINGS: WeakSet[OpenWindowWarning] = WeakSet()


@atexit.register
def warn_at_the_end() -> None:
    if hasattr(sys, "last_value") or "pytest" in sys.modules:
        return
    for warning in OPEN_WINDOW_WARNINGS:
        warning.warn_if_open(OPEN_AT_THE_END)


class ChangedRateWarning(Extension):
    """Warns once if a learning rate changes inside one of the first two windows, for
    example because a scheduler steps after each micro-batch.
    """

    def __init__(self, windows: Any, inner: Any) -> None:
        self.windows = windows
        self.inner = inner
        self.rates: list[float] = []
        """The learning rates when the last micro-batch was added."""
        self.is_active = True

    def micro_batch_given(self) -> None:
        if not self.is_active:
            return
        rates = [float(group["lr"]) for group in self.inner.param_groups]
        state = self.windows.read()
        is_changed = self.rates not in ([], rates) and state.micro_step > 0
        self.rates = rates
        self.is_active = not is_changed and state.optimizer_step < 2
        if is_changed:
            warnings.warn(kit.RATE_MOVED, GradAccumWarning, stacklevel=3)
