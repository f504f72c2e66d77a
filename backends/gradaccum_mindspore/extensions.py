"""The loss of a window, and the listeners that hear of each window.

A micro-batch whose loss nobody tells writes nothing. Beside the sum of losses stands
the weight of the micro-batches that told theirs: if that is not the window's weight at
its end, the window's loss is NaN. Methods of `Knowledge` with ``compiled_`` in their
name are for the compiler to follow, and only compute.

Compiled code can call no listener. The counters tell what it closed: the training cell,
the optimizer and ``flush`` look at them after each call from Python, as does
``result``. One window may close between two looks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias
from weakref import WeakSet

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

from gradaccum import StepResult, UsageError, kit
from gradaccum.kit import Fields, Handle, Listener, Listeners, Options, State, explain
from gradaccum_mindspore.gradient_sum import DType, hidden_parameter, where

LOSS = "loss"
"""The end of the Parameter's name."""
NO_LOSS = (0.0, 0.0, math.nan)
Losses: TypeAlias = Sequence[float]
"""The sum of the open window's losses, the weight of the micro-batches that told
theirs, the last closed window's loss.
"""


class Knowledge(nn.Cell):  # type: ignore[misc]
    """The loss of one accumulation's windows."""

    def __init__(self, prefix: str, options: Options, float_dtype: DType) -> None:
        super().__init__(auto_prefix=False)
        self.options = options._replace(steps=None, scaler=None)
        self.float_dtype = float_dtype
        self.loss = hidden_parameter(Tensor(NO_LOSS, float_dtype), f"{prefix}.{LOSS}")
        """`Losses`."""
        self.one, self.zero, self.nan = (
            Tensor(number, float_dtype) for number in (1.0, 0.0, math.nan)
        )

    def pull(self) -> Losses:
        losses: Losses = self.loss.tolist()
        return losses

    def push(self, losses: Losses) -> None:
        if not np.array_equal(self.pull(), losses, equal_nan=True):
            with np.errstate(over="ignore"):
                dtype = np.float64 if self.float_dtype == ms.float64 else np.float32
                ops.assign(self.loss, Tensor.from_numpy(np.array(losses, dtype)))

    def add_loss(self, loss: float, weight: float, adds: bool) -> None:
        """Add a micro-batch's loss; `adds`: whether its gradient was added."""
        total, told, last = self.pull()
        added = kit.add_loss(total, loss, weight, adds, self.options, kit.select)
        self.push((added, told + weight if adds else told, last))

    def after(self, state: State, ending: State, options: Options) -> Losses:
        """Return the losses after a window of `state`; `ending` and `options` say what
        its sum is divided by.
        """
        total, told, _ = self.pull()
        loss = kit.window_loss(
            total if told == state.weight else math.nan, ending, options, kit.select
        )
        return 0.0, 0.0, loss

    def forgotten(self) -> Losses:
        return 0.0, 0.0, self.last_loss()

    def last_loss(self) -> float:
        return self.pull()[2]

    def share(self, state: State) -> float:
        total, told, _ = self.pull()
        return total if told == state.weight else math.nan

    def push_joined(self, state: State, loss: float) -> None:
        """Write the sum of the workers' `share`; `state` is that of all."""
        self.push((loss, state.weight, self.last_loss()))

    def compiled_told(self, loss: Tensor, weight: Tensor, adds: Tensor) -> Tensor:
        # A weighted mean's parts are multiplied by the weight, so that its weight
        # stands there as 1.
        parts = ops.stack(
            (loss, self.one if self.options.reduction == "mean" else weight, self.zero)
        )
        return kit.add_loss(self.loss.value(), parts, weight, adds, self.options, where)

    def compiled_certain(self, loss: Tensor, weight: Tensor | None) -> Tensor:
        """Add a micro-batch that is certainly added to `loss`; its weight is 1 if it is
        None.
        """
        part = loss if weight is None else kit.contribution(weight, self.options) * loss
        return ops.stack((part, self.one if weight is None else weight, self.zero))

    def compiled_after(self, state: Fields) -> Tensor:
        _, _, _, weight, _, _, _ = state
        value = self.loss.value()
        total = where(value[1] == weight, value[0], self.nan)
        loss = where(
            weight > 0, kit.window_loss(total, state, self.options, where), self.nan
        )
        return ops.stack((self.zero, self.zero, loss.astype(self.float_dtype)))

    def compiled_forgotten(self) -> Tensor:
        return ops.stack((self.zero, self.zero, self.loss.value()[2]))

    def compiled_share(self, state_weight: Tensor) -> Tensor:
        value = self.loss.value()
        return where(value[1] == state_weight, value[0], self.nan)

    def compiled_joined(self, weight: Tensor, loss: Tensor) -> Tensor:
        """Return what `push_joined` writes; `weight` is that of all workers."""
        return ops.stack((loss, weight, self.loss.value()[2]))


class Counted(Protocol):
    """The state of the window that is listened to."""

    def pull(self) -> State:
        """Return it in Python numbers."""

    def result(self) -> StepResult:
        """Return the last event's result."""


class Follower(Protocol):
    """A scheduler that moves once per update."""

    def follow(self) -> None:
        """Move if an update was applied since the last move."""

    def loaded(self) -> None:
        """Note that a checkpoint was loaded, which is no update."""


class Listening:
    """The listeners and the schedulers of one optimizer."""

    def __init__(self, storage: Counted) -> None:
        self.storage, self.listeners = storage, Listeners()
        self.schedulers: WeakSet[Follower] = WeakSet()
        self.seen = storage.pull()
        """At the last look."""

    def add(self, listener: Listener) -> Handle:
        if not self.listeners.added:
            self.seen = self.storage.pull()
        return self.listeners.add(listener)

    def on_update(self, function: Callable[[], object]) -> Handle:
        if not self.listeners.added:
            self.seen = self.storage.pull()
        return self.listeners.on_update(function)

    def loaded(self) -> None:
        self.seen = self.storage.pull()
        for scheduler in self.schedulers:
            scheduler.loaded()

    def window_ended(self, before: State) -> None:
        """Note the window that the host has just closed; `before`: the state before,
        with all workers' weight.
        """
        if self.listeners.added:
            self.seen = self.storage.pull()
            self.listeners.note(
                self.storage.result(),
                weight=before.weight,
                micro_batches=before.micro_step,
            )

    def look(self, micro_batches: float = math.nan) -> None:
        """Note the window that compiled code closed since the last look."""
        if not self.listeners.added:
            return
        before, self.seen = self.seen, self.storage.pull()
        closed = _closed(self.seen) - _closed(before)
        if closed > 1:
            expected, found = (
                "optimizer.result to be read after each compiled step",
                f"{closed} windows that closed since the last look",
            )
            fix = (
                "Read it, train with gradaccum_mindspore.TrainOneStepCell, or take"
                " callbacks=[WatchWindows(optimizer)] in Model.train."
            )
            raise explain(
                UsageError, "listeners", expected=expected, found=found, fix=fix
            )
        if closed == 1:
            applied = self.seen.optimizer_step > before.optimizer_step
            held = (
                before.micro_step + micro_batches
                if self.seen.micro_step == 0
                else math.nan
            )
            self.listeners.note(
                self.storage.result()._replace(applied=applied, skipped=not applied),
                micro_batches=held,
            )

    def tell(self, micro_batches: float = math.nan) -> None:
        if self.listeners.added:
            with self.listeners.settled():
                self.look(micro_batches)

    def after(
        self,
        micro_batches: int,
        call: Callable[..., Any],
        *arguments: Any,
        **named: Any,
    ) -> Any:
        """Make a `call` that takes in so many micro-batches and may close windows, and
        tell of them.
        """
        if not self.listeners.added:
            return call(*arguments, **named)
        with self.listeners.settled():
            self.look()
            self.listeners.tell()
            answer = call(*arguments, **named)
            self.look(micro_batches)
        return answer

    def between(self) -> None:
        """Repeat between two windows of one call what the other workers' loops do after
        each window.
        """
        self.look(0)
        self.listeners.tell()
        for scheduler in self.schedulers:
            scheduler.follow()


def _closed(state: State) -> int:
    closed: int = state.optimizer_step + state.skipped_windows
    return closed
