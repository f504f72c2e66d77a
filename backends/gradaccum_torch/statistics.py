"""The loss of a window.

A loss on an accelerator is read with the norm at the window's end, or with
``on_overflow="ignore"`` when somebody asks for the result.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from gradaccum import kit
from gradaccum.kit import window_loss
from gradaccum_torch.private.names import is_sharded

Told = float | Tensor
"""A loss: a number, or a scalar on its accelerator, shape ``()``."""


class Known(NamedTuple):
    """The statistics in a checkpoint."""

    loss: float = 0.0
    """The sum of the open window's losses, as `gradaccum.kit.add_loss` makes it."""
    window_loss: float = math.nan
    """That of the last closed window."""


NOTHING_KNOWN = Known()


def as_told(loss: object) -> Told:
    """Return `loss`, a scalar tensor or a number, as it is kept; NaN for anything
    else.
    """
    if not isinstance(loss, Tensor):
        return (
            float(loss)
            if isinstance(loss, int | float) and not isinstance(loss, bool)
            else math.nan
        )
    if loss.numel() != 1 or loss.is_complex():
        return math.nan
    loss = loss.detach()
    whole: Tensor = loss.full_tensor() if is_sharded(loss) else loss  # type: ignore[attr-defined]
    # A copy: a captured CUDA graph writes the next loss into the same memory.
    return whole.item() if whole.is_cpu else whole.reshape(()).clone()


def _one_nan(value: float) -> float:
    """Return NaN as one object, so that equal results compare equal."""
    return math.nan if value != value else float(value)


class _Counted(NamedTuple):
    total: float = 0.0
    """The sum of the losses that are read."""
    micro_batches: int = 0
    joined: bool = False
    """The sum is that of all workers."""
    unread: tuple[tuple[Tensor, float], ...] = ()
    """Each loss that is on its device, and the weight of its micro-batch."""

    def are_all(self, micro_step: int) -> bool:
        """True if no micro-batch is missing: an interrupt can leave one out."""
        return self.joined or self.micro_batches == micro_step

    def read(self, values: Sequence[float], options: kit.Options) -> _Counted:
        total = self.total
        for value, (_, weight) in zip(values, self.unread, strict=True):
            total = kit.add_loss(total, value, weight, True, options, kit.select)
        return self._replace(total=total, unread=())

    def all_read(self, options: kit.Options) -> _Counted:
        return (
            self.read([loss.item() for loss, _ in self.unread], options)
            if self.unread
            else self
        )


_UNKNOWN = _Counted(math.nan)


class Statistics:
    """The statistics of the open window and of the last closed one."""

    def __init__(self, options: kit.Options) -> None:
        self._options = options
        self._closed: tuple[_Counted, kit.Fields, kit.Options] | float = math.nan
        """The loss of the last closed window, or what it is made of."""
        self._open = _Counted()

    def counted(
        self, before: kit.State, weight: float, finite: bool, losses: Sequence[Told]
    ) -> None:
        total, micro_batches, joined, unread = self._open
        if total != total:
            return  # NaN, and nothing makes it a number again.
        if kit.usable(before, weight, finite):
            if not losses:
                total = math.nan
            for loss in losses:
                if isinstance(loss, Tensor):
                    unread = (*unread, (loss, weight))
                else:
                    total = kit.add_loss(
                        total, loss, weight, True, self._options, kit.select
                    )
        self._open = _Counted(total, micro_batches + 1, joined, unread)

    @property
    def unread(self) -> list[Tensor]:
        """The losses that are on their device."""
        return [loss for loss, _ in self._open.unread] if self._open.unread else []

    def read(self, values: Sequence[float]) -> None:
        self._open = self._open.read(values, self._options)

    def numbers(self, micro_step: int) -> list[float]:
        """Return the numbers to sum over all workers, for `join`; waits for the device
        where losses are unread.
        """
        return [self._total(micro_step)]

    def join(self, numbers: Sequence[float]) -> None:
        """Take the `numbers` summed over all workers; again after an update that
        raised.
        """
        if self._open.joined:
            return
        (loss,) = numbers
        self._open = _Counted(loss, joined=True)

    def window_ended(self, ended: kit.Fields, options: kit.Options) -> None:
        """End the window that was `ended`; the `options` say by what its losses are
        divided.
        """
        self._closed = (
            (self._open if self._open.are_all(int(ended[0])) else _UNKNOWN),
            ended,
            options,
        )
        self._open = _Counted()

    def discard(self) -> None:
        self._open = _Counted()

    @property
    def loss(self) -> float:
        """The last closed window's loss; NaN if one of its losses is unknown. May wait
        for the device.
        """
        if isinstance(self._closed, tuple):
            counted, ended, options = self._closed
            self._closed = _one_nan(
                window_loss(
                    counted.all_read(self._options).total, ended, options, kit.select
                )
            )
        return self._closed

    def saved(self, micro_step: int) -> Known:
        """Return the statistics for a checkpoint; may wait for the device."""
        return Known(self._total(micro_step), self.loss)

    def restore(self, known: Known, micro_step: int) -> None:
        self._closed = _one_nan(known.window_loss)
        self._open = _Counted(known.loss, micro_step)

    def _total(self, micro_step: int) -> float:
        self._open = self._open.all_read(self._options)
        return self._open.total if self._open.are_all(micro_step) else math.nan
