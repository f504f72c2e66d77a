"""The statistics of a window, its loss and the noise of its gradient, and the listeners
that hear of each window.

A micro-batch whose loss nobody tells writes nothing. Beside the sum of losses stands
the weight of the micro-batches that told theirs: if that is not the window's weight at
its end, the window's loss is NaN. Methods of `Knowledge` with ``compiled_`` in their
name are for the compiler to follow. They only compute, except `compiled_see_first`, the
body of a branch of its own.

Compiled code can call no listener. The counters tell what it closed: the training cell,
the optimizer and ``flush`` look at them after each call from Python, as does
``result``. One window may close between two looks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol
from weakref import WeakSet

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops

from gradaccum import StepResult, UsageError, kit
from gradaccum.kit import Fields, Handle, Listener, Listeners, Options, State, explain
from gradaccum_mindspore.sums import DType, Sums, hidden_parameter, norm_over, where

LOSS, NOISE = "loss", "noise"
"""The ends of the Parameters' names."""
NO_LOSS = (0.0, 0.0, math.nan)
NO_NOISE = (0.0, 0.0, 0.0, 0.0, 0.0)


class Known(NamedTuple):
    """Both Parameters' values, in Python numbers."""

    loss: Sequence[float]
    noise: Sequence[float] | None
    """None where the noise is not measured."""


class Knowledge(nn.Cell):  # type: ignore[misc]
    """The loss and the noise of one accumulation's windows."""

    def __init__(self, prefix: str, options: Options, float_dtype: DType) -> None:
        super().__init__(auto_prefix=False)
        self.options = options._replace(steps=None, scaler=None)
        self.float_dtype = float_dtype
        self.loss = hidden_parameter(Tensor(NO_LOSS, float_dtype), f"{prefix}.{LOSS}")
        """(sum of the open window's losses, weight of the micro-batches that told
        theirs, the last closed window's loss).
        """
        self.has_noise = options.noise_decay is not None
        if self.has_noise:
            self.noise = hidden_parameter(
                Tensor(NO_NOISE, float_dtype), f"{prefix}.{NOISE}"
            )
            """The fields of `gradaccum.kit.Noise`, and how many first micro-batches its
            first two stand for.
            """
        self.one, self.zero, self.nan = (
            Tensor(number, float_dtype) for number in (1.0, 0.0, math.nan)
        )

    def starts(self) -> dict[str, Sequence[float]]:
        """Return the first value, by name, of what a checkpoint lacks that was saved
        without ``noise_scale=``.
        """
        return {self.noise.name: NO_NOISE} if self.has_noise else {}

    def pull(self) -> Known:
        return Known(
            self.loss.tolist(), self.noise.tolist() if self.has_noise else None
        )

    def push(self, known: Known) -> None:
        self._assign(self.loss, known.loss)
        if known.noise is not None:
            self._assign(self.noise, known.noise)

    def add_loss(self, loss: float, weight: float, adds: bool) -> None:
        """Add a micro-batch's loss; `adds`: whether its gradient was added."""
        total, told, last = self.loss.tolist()
        self._assign(
            self.loss,
            (
                kit.add_loss(total, loss, weight, adds, self.options, kit.select),
                told + weight if adds else told,
                last,
            ),
        )

    def needs_first(self, state: State) -> bool:
        """True if the sum's norm is wanted now: this micro-batch is the first of its
        window to have added something.
        """
        return self.has_noise and bool(kit.is_first(self.noise.tolist()[:4], state))

    def see_first(self, state: State, norm: float) -> None:
        self._assign(
            self.noise,
            (*kit.first_seen(self.noise.tolist()[:4], state, norm, kit.select), 1.0),
        )

    def after(
        self, state: State, grad_norm: float, ending: State, options: Options
    ) -> Known:
        """Return what is known after a window of `state`; `ending` and `options` say
        what its sum is divided by.
        """
        total, told, _ = self.loss.tolist()
        loss = kit.window_loss(
            total if told == state.weight else math.nan, ending, options, kit.select
        )
        if not self.has_noise:
            return Known((0.0, 0.0, loss), None)
        *noise, firsts = self.noise.tolist()
        return Known(
            (0.0, 0.0, loss),
            (
                *kit.window_seen(
                    noise, state, grad_norm, self.options, kit.select, firsts
                ),
                0.0,
            ),
        )

    def forgotten(self) -> Known:
        *_, last = self.loss.tolist()
        return Known(
            (0.0, 0.0, last),
            (
                (*kit.forget_window(self.noise.tolist()[:4]), 0.0)
                if self.has_noise
                else None
            ),
        )

    def results(self) -> tuple[float, float]:
        scale = (
            float(kit.noise_scale(self.noise.tolist()[:4], kit.select))
            if self.has_noise
            else math.nan
        )
        return self.loss.tolist()[2], scale

    def shares(self, state: State) -> list[float]:
        total, told, _ = self.loss.tolist()
        loss = total if told == state.weight else math.nan
        if not self.has_noise:
            return [loss]
        return [loss, *kit.noise_shares(self.noise.tolist()[:4], kit.select)]

    def push_joined(self, state: State, shares: Sequence[float]) -> None:
        """Write the sums of the workers' `shares`; `state` is that of all."""
        *_, last = self.loss.tolist()
        self._assign(self.loss, (shares[0], state.weight, last))
        if self.has_noise:
            _, weight, squares, firsts = shares
            self._assign(
                self.noise,
                (
                    *kit.joined_noise(
                        self.noise.tolist()[:4], weight, squares, kit.select
                    ),
                    firsts,
                ),
            )

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

    def compiled_after(
        self, state: Fields, grad_norm: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        _, _, _, weight, _, _, _ = state
        value = self.loss.value()
        total = where(value[1] == weight, value[0], self.nan)
        loss = where(
            weight > 0, kit.window_loss(total, state, self.options, where), self.nan
        )
        noise = None
        if self.has_noise:
            seen = self.noise.value()
            fields = kit.window_seen(
                (seen[0], seen[1], seen[2], seen[3]),
                state,
                grad_norm,
                self.options,
                where,
                seen[4],
            )
            noise = self.stacked(fields, self.zero)
        return ops.stack((self.zero, self.zero, loss.astype(self.float_dtype))), noise

    def compiled_forgotten(self) -> tuple[Tensor, Tensor | None]:
        noise = None
        if self.has_noise:
            seen = self.noise.value()
            noise = self.stacked(
                kit.forget_window((seen[0], seen[1], seen[2], seen[3])), self.zero
            )
        return ops.stack((self.zero, self.zero, self.loss.value()[2])), noise

    def compiled_write(self, loss: Tensor, noise: Tensor | None) -> bool:
        ops.assign(self.loss, loss)
        if noise is not None:
            ops.assign(self.noise, noise)
        return True

    def compiled_needs_first(self, state: Fields) -> Tensor:
        seen = self.noise.value()
        return kit.is_first((seen[0], seen[1], seen[2], seen[3]), state)

    def compiled_see_first(
        self, sums: Sums, weight: Parameter, loss_scale: Parameter
    ) -> bool:
        """Measure the sum that `needs_first` asked for. The runtime would keep a copy
        of a value that is no Parameter.
        """
        held, scale, seen = (
            weight.value(),
            loss_scale.value().astype(self.float_dtype),
            self.noise.value(),
        )
        zero = self.zero
        # Only the weight and the scale of the state are read.
        state = (zero, zero, zero, held, zero > 1, scale, zero)
        fields = kit.first_seen(
            (seen[0], seen[1], seen[2], seen[3]),
            state,
            norm_over(sums, held * scale),
            where,
        )
        ops.assign(self.noise, self.stacked(fields, self.one))
        return True

    def compiled_shares(self, state_weight: Tensor) -> tuple[Tensor, ...]:
        value = self.loss.value()
        loss = where(value[1] == state_weight, value[0], self.nan)
        if not self.has_noise:
            return (loss,)
        seen = self.noise.value()
        weight, squares, count = kit.noise_shares(
            (seen[0], seen[1], seen[2], seen[3]), where
        )
        return loss, weight, squares, count

    def compiled_push_joined(self, numbers: Tensor, place: int) -> bool:
        """Return `push_joined`, of the workers' `numbers` from `place` on; the first
        number is the weight of all.
        """
        ops.assign(
            self.loss, ops.stack((numbers[place], numbers[0], self.loss.value()[2]))
        )
        if self.has_noise:
            seen = self.noise.value()
            fields = kit.joined_noise(
                (seen[0], seen[1], seen[2], seen[3]),
                numbers[place + 1],
                numbers[place + 2],
                where,
            )
            ops.assign(self.noise, self.stacked(fields, numbers[place + 3]))
        return True

    def stacked(
        self, fields: tuple[Tensor, Tensor, Tensor, Tensor], firsts: Tensor
    ) -> Tensor:
        return ops.stack(
            [field.astype(self.float_dtype) for field in (*fields, firsts)]
        )

    def _assign(self, parameter: Parameter, values: Sequence[float]) -> None:
        if not np.array_equal(parameter.tolist(), values, equal_nan=True):
            with np.errstate(over="ignore"):
                dtype = np.float64 if self.float_dtype == ms.float64 else np.float32
                ops.assign(parameter, Tensor.from_numpy(np.array(values, dtype)))


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
