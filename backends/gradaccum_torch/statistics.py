"""The statistics of a window besides its gradient: its loss, the numbers of the noise scale, and the listeners.

A loss on the CPU becomes a number at once. A loss on an accelerator is copied there and read with the norm, at the window's end. A window
that measures no norm (``on_overflow="ignore"``) waits for nothing: there losses are read when somebody asks for the result.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, TypeVar

from torch import Tensor

from gradaccum import StepResult
from gradaccum.kit import (
    Fields,
    Handle,
    Listener,
    Listeners,
    Noise,
    Options,
    State,
    add_loss,
    first_seen,
    forget_window,
    is_first,
    joined_noise,
    no_noise,
    noise_scale,
    noise_shares,
    select,
    usable,
    window_loss,
    window_seen,
)
from gradaccum_torch.private import is_sharded

Told = float | Tensor
"""A loss: a number, or a scalar on its accelerator, shape ``()``."""


class Known(NamedTuple):
    """The statistics in a checkpoint."""

    loss: float = 0.0
    """The sum of the open window's losses, as `gradaccum.kit.add_loss` makes it."""
    window_loss: float = math.nan
    """That of the last closed window."""
    noise: Noise | None = None
    """None: nobody measured it."""


NOTHING_KNOWN = Known()


def as_told(loss: object) -> Told:
    """Return `loss`, a scalar tensor or a number, as it is kept; NaN for anything else."""
    if not isinstance(loss, Tensor):
        return float(loss) if isinstance(loss, int | float) and not isinstance(loss, bool) else math.nan
    if loss.numel() != 1 or loss.is_complex():
        return math.nan
    loss = loss.detach()
    whole: Tensor = loss.full_tensor() if is_sharded(loss) else loss  # type: ignore[attr-defined]
    # A copy: a captured CUDA graph writes the next loss into the same memory.
    return whole.item() if whole.is_cpu else whole.reshape(()).clone()


def _one_nan(value: float) -> float:
    """Return NaN as one object, so that equal results compare equal: tuples compare identity first."""
    return math.nan if value != value else float(value)


class _Losses:
    def __init__(self, total: float = 0.0) -> None:
        self.total = total
        self.unread: list[tuple[Tensor, float]] = []
        """A loss and the weight of its micro-batch."""

    def add(self, loss: Told, weight: float, options: Options) -> None:
        if isinstance(loss, Tensor):
            self.unread.append((loss, weight))
        else:
            self.total = add_loss(self.total, loss, weight, True, options, select)

    def read(self, values: Sequence[float], options: Options) -> None:
        unread, self.unread = self.unread, []
        for value, (_, weight) in zip(values, unread, strict=True):
            self.add(value, weight, options)

    def summed(self, options: Options) -> float:
        """Return the sum of all; waits for the device where some are unread."""
        if self.unread:
            self.read([loss.item() for loss, _ in self.unread], options)
        return self.total


class Statistics:
    """The statistics of the open window and of the last closed one."""

    def __init__(self, options: Options) -> None:
        self._options, self.measures_noise = options, options.noise_decay is not None
        self._noise = no_noise()
        self._closed: tuple[_Losses, Fields, Options] | float = math.nan
        """The loss of the last closed window, or what it is made of."""
        self._open, self._counted, self._joined, self._firsts = _Losses(), 0, False, 1

    def counted(self, before: State, weight: float, finite: bool, losses: Sequence[Told]) -> None:
        """Count a micro-batch with the losses that were passed for it; `finite` is False if it was dropped."""
        open_one = self._open
        if open_one.total != open_one.total:
            return  # NaN, and nothing makes it a number again.
        if usable(before, weight, finite):
            if not losses:
                open_one.total = math.nan
            for loss in losses:
                open_one.add(loss, weight, self._options)
        self._counted += 1

    def is_first(self, fields: State) -> bool:
        """True if the norm of the sum is wanted now, since it holds the window's first micro-batch alone."""
        return bool(is_first(self._noise, fields))

    def first_seen(self, fields: State, norm: float) -> None:
        self._noise = Noise(*first_seen(self._noise, fields, norm, select))

    def groups_changed(self) -> None:
        """Note that the sum is over other parameters than the first micro-batch's, so that the window says nothing about the noise."""
        if self._noise.first_weight:
            self._noise = self._noise._replace(first_square=math.inf)

    @property
    def unread(self) -> list[Tensor]:
        return [loss for loss, _ in self._open.unread]

    def read(self, values: Sequence[float]) -> None:
        self._open.read(values, self._options)

    def numbers(self, micro_step: int) -> list[float]:
        """Return the numbers to sum over all workers, for `join`; waits for the device where losses are unread."""
        return [self._summed(micro_step), *(noise_shares(self._noise, select) if self.measures_noise else ())]

    def join(self, numbers: Sequence[float]) -> None:
        """Take the `numbers` summed over all workers. After an update that raised this comes again."""
        if self._joined:
            return
        loss, *first = numbers
        self._open, self._joined = _Losses(loss), True
        if first:
            weight, squares, count = first
            self._noise = Noise(*joined_noise(self._noise, weight, squares, select))
            self._firsts = int(count)

    def window_ended(self, ended: State, options: Options, grad_norm: float) -> None:
        """End the window that was `ended` under these `options`; they say by what its losses are divided."""
        if self.measures_noise:
            self._noise = Noise(*window_seen(self._noise, ended, grad_norm, self._options, select, self._firsts))
        closed = self._open if self._is_complete(ended.micro_step) else _Losses(math.nan)
        self._closed = closed, ended, options
        self._begin()

    def discard(self) -> None:
        self._noise = Noise(*forget_window(self._noise))
        self._begin()

    @property
    def loss(self) -> float:
        """The last closed window's loss; NaN if one of its losses is unknown. May wait for the device."""
        if isinstance(self._closed, tuple):
            losses, ended, options = self._closed
            self._closed = _one_nan(window_loss(losses.summed(self._options), ended, options, select))
        return self._closed

    @property
    def noise_scale(self) -> float:
        """The noise scale in items; NaN where it is not measured."""
        return _one_nan(noise_scale(self._noise, select)) if self.measures_noise else math.nan

    def saved(self, micro_step: int) -> Known:
        """Return the statistics for a checkpoint; may wait for the device."""
        return Known(self._summed(micro_step), self.loss, self._noise if self.measures_noise else None)

    def restore(self, known: Known, micro_step: int) -> None:
        self._closed = _one_nan(known.window_loss)
        self._noise = no_noise() if known.noise is None else known.noise
        self._begin(known.loss, micro_step)

    def _begin(self, total: float = 0.0, micro_step: int = 0) -> None:
        self._open, self._counted, self._joined, self._firsts = _Losses(total), micro_step, False, 1

    def _is_complete(self, micro_step: int) -> bool:
        """True if all micro-batches, or all workers', were counted here; an interrupt can leave one out."""
        return self._joined or self._counted == micro_step

    def _summed(self, micro_step: int) -> float:
        return self._open.summed(self._options) if self._is_complete(micro_step) else math.nan


# The listeners of a wrapped optimizer hear of a window when the call that closed it is through, or closes another one.


T = TypeVar("T")


class Ended(Protocol):
    """A window that has just closed."""

    @property
    def result(self) -> StepResult:
        """The result of the window's end, in Python numbers."""


class Listening:
    """The listeners of one optimizer."""

    def __init__(self) -> None:
        self._listeners = Listeners()

    def add(self, listener: Listener) -> Handle:
        return self._listeners.add(listener)

    def window_ended(self, before: State, window: Ended) -> None:
        """Note that `window` has closed; `before` is its state before, with the weight of all workers."""
        if self._listeners:
            self._listeners.note(window.result, weight=before.weight, micro_batches=before.micro_step)

    def tell(self) -> None:
        """Report the closed windows; `after` raises what a listener raises."""
        self._listeners.tell()

    def after(self, call: Callable[[], T]) -> T:
        if not self._listeners:
            return call()
        with self._listeners.settled():
            return call()


NOBODY = Listening()
"""For an optimizer that never had a listener."""
