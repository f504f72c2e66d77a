"""Objects that observe a window without changing it. They compute the window's loss, or
warn about common mistakes.
"""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from gradaccum import GradAccumWarning, kit
from gradaccum.kit import Fields, Options
from gradaccum_torch.checks import Size, known_window_size, other_weight_error
from gradaccum_torch.torch_private.names import (
    Division,
    is_sharded,
    last_division,
    version,
)

LEFTOVER_LOOP = (
    "gradaccum: each step() came after {passes} backward passes, which count as one"
    " micro-batch. Most likely two lines of the old loop are left: `if (i + 1) %"
    " {passes} == 0:` around step(), and `loss / {passes}`. Delete both, so that each"
    " backward pass is followed by a step(). If a trainer also accumulates gradients,"
    " set its gradient_accumulation_steps to 1."
)
NON_FINITE_LOSS = (
    "gradaccum: a loss was not finite on rank {} of {}. Check the data and the loss on"
    " that rank. opt.result.overflow shows whether all workers skipped the window."
)
WEIGHED_TWICE = (
    "gradaccum: a second loss with a weight was passed before step(), so both losses"
    " count as one micro-batch with that weight. Each micro-batch needs its own step()."
    " If one micro-batch has several losses, call opt.weigh(n) once, and then"
    " opt.backward(loss) for each loss."
)


class MicroBatch:
    """The weight and the losses that the user has passed for the current micro-batch.
    ``step`` has not counted this micro-batch yet.
    """

    weight: float | None = None
    is_weighed = False
    """Whether the user has passed the weight."""
    has_loss = False
    """Whether a loss of this micro-batch was passed to ``backward`` or ``scale``."""
    is_scaled_by_hand = False
    """Whether the loss was already scaled when the user called ``backward()`` on it, as
    in ``opt.scale(loss).backward()``.
    """
    divided_losses = 0
    """How many losses of this micro-batch the user has most likely divided by the
    number of micro-batches in a window, according to `is_divided_by`. Always 0 after
    the first window, because `DividedLossWarning` checks only the first window.
    """
    is_first = False
    """Whether this micro-batch is the first of its window."""
    passes = 0
    """The number of the user's backward passes for this micro-batch. ``step`` sets this
    number when it counts the micro-batch.
    """
    window_size: Size = None

    def __init__(self) -> None:
        self.losses: list[float | Tensor] = []
        """The unscaled losses that the user passed."""

    def require_same_weight(self, weight: float) -> None:
        if self.weight not in (None, weight):
            raise other_weight_error(weight, self.weight)

    def set_weight(self, weight: float) -> None:
        self.require_same_weight(weight)
        self.weight = weight


class Extension:
    """The base class of objects that observe a window, such as `WindowLoss`. The
    docstring of each method says when the window calls the method. The methods must not
    change the window.
    """

    is_finished = False
    """Whether this extension has nothing left to observe. If so, the window stops
    calling it. An extension that checks only the first window therefore does not slow
    down the rest of the run.
    """

    def micro_batch_added(self, micro_batch: MicroBatch, weight: float) -> None:
        """Called after a micro-batch has been counted. `weight` is 0 if the
        micro-batch's gradient was not added to the sum.
        """

    def numbers(self) -> list[float]:
        """Called before the workers reduce a window's gradients, and before a window is
        discarded. Return this extension's own numbers, such as the sum of this worker's
        losses. The workers add up or average these numbers together with the gradients.
        """
        return []

    def reduced(self, numbers: list[float]) -> None:
        """Called after the workers have reduced a window's gradients. `numbers` is the
        list that the method `numbers` returned, with each entry replaced by its sum or
        its average over all workers.
        """

    def window_closed(self, state: Fields, options: Options) -> None:
        """Called after the window was closed. `state` contains the window's weight. If
        a denominator was passed to ``flush``, `state` contains the denominator instead
        of the weight.

        With ``reduction="sum"`` in `options`, the gradient sum was not divided.
        Otherwise, it was divided by the weight or denominator in `state`. `WindowLoss`
        treats the sum of the losses in the same way.
        """

    def window_discarded(self) -> None:
        """Called after the window was discarded, or replaced by a window from a
        checkpoint.
        """

    def state_dict(self) -> dict[str, float]:
        """Return this extension's entries for a checkpoint."""
        return {}

    def load_state_dict(self, entries: dict[str, Any]) -> None:
        """Restore this extension from the `entries` of a checkpoint."""


def as_number(loss: object) -> float | Tensor:
    """Return `loss` as a Python number, or as a scalar tensor if `loss` is on an
    accelerator. Return NaN if `loss` is not a single real number.
    """
    if not isinstance(loss, Tensor):
        if isinstance(loss, int | float) and not isinstance(loss, bool):
            return float(loss)
        return math.nan
    if loss.numel() != 1 or loss.is_complex():
        return math.nan
    scalar: Any = loss
    if is_sharded(scalar):
        scalar = scalar.detach().full_tensor()
    if scalar.is_cpu:
        return float(scalar.item())
    # Copy the loss, because each replay of a captured CUDA graph writes its loss into
    # the same memory.
    copied_scalar: Tensor = scalar.detach().reshape(()).clone()
    return copied_scalar


class WindowLoss(Extension):
    """Computes each window's loss as if the window were one large batch. The loss is
    NaN if the loss of any micro-batch is unknown. Reading the loss may wait for the
    device.
    """

    def __init__(self, options: Options) -> None:
        self._options = options
        self._losses: list[tuple[float | Tensor, float]] = []
        """The losses of the open window that have not been added to `total` yet, with
        their weights.
        """
        self.total = 0.0
        """The weighted sum of the open window's losses that have already been read from
        the device.
        """
        self._misses_loss = False
        """Whether any micro-batch in the open window has an unknown loss."""
        self._read_closed_loss: Callable[[], float] | None = None
        self._value = math.nan

    @property
    def value(self) -> float:
        """The loss of the last closed window."""
        if self._read_closed_loss is not None:
            self._value = self._read_closed_loss()
            self._read_closed_loss = None
        # Always return the same NaN object, so that two results with NaN can compare
        # equal.
        return math.nan if math.isnan(self._value) else self._value

    def micro_batch_added(self, micro_batch: MicroBatch, weight: float) -> None:
        if weight:
            self._misses_loss = self._misses_loss or not micro_batch.losses
            losses = micro_batch.losses or [math.nan]
            self._losses += [(loss, weight) for loss in losses]

    def _read(self, total: float, losses: list[tuple[float | Tensor, float]]) -> float:
        on_device = [loss.double() for loss, _ in losses if isinstance(loss, Tensor)]
        values = iter(torch.stack(on_device).tolist() if on_device else ())
        options = self._options
        for loss, weight in losses:
            value = next(values) if isinstance(loss, Tensor) else loss
            total = float(kit.add_loss(total, value, weight, True, options, kit.select))
        return total

    def read_open(self) -> float:
        """Return the weighted sum of the open window's losses."""
        self.total = self._read(self.total, self._losses)
        self._losses = []
        return self.total

    def numbers(self) -> list[float]:
        return [self.read_open()]

    def reduced(self, numbers: list[float]) -> None:
        (self.total,) = numbers

    def has_non_finite_loss(self) -> bool:
        """True if all losses of the open window are known, and at least one is not
        finite.
        """
        return not self._misses_loss and not math.isfinite(self.read_open())

    def window_closed(self, state: Fields, options: Options) -> None:
        total = self.total
        losses = self._losses

        def read() -> float:
            loss = self._read(total, losses)
            return float(kit.window_loss(loss, state, options, kit.select))

        self._read_closed_loss = read
        self.window_discarded()

    def window_discarded(self) -> None:
        self.total = 0.0
        self._losses = []
        self._misses_loss = False

    def state_dict(self) -> dict[str, float]:
        return {"loss": self.read_open(), "window_loss": self.value}

    def load_state_dict(self, entries: dict[str, Any]) -> None:
        self._read_closed_loss = None
        self.total = entries.get("loss", 0.0)
        self._misses_loss = math.isnan(self.total)
        self._value = float(entries.get("window_loss", math.nan))


class Warnings:
    """Issues each warning once per optimizer. Each warning points to the line of the
    user's code that called gradaccum.
    """

    def __init__(self) -> None:
        self._given_texts: set[str] = set()

    def __call__(self, text: str) -> None:
        if text not in self._given_texts:
            self._given_texts.add(text)
            warnings.warn(text, GradAccumWarning, stacklevel=levels_to_user())


def levels_to_user() -> int:
    """Return the ``stacklevel`` with which a warning points to the user's code."""
    level = 2
    frame = sys._getframe(level)
    while frame.f_back is not None and is_ours(frame):
        frame = frame.f_back
        level += 1
    return level


def is_ours(frame: FrameType) -> bool:
    package = str(frame.f_globals.get("__name__")).partition(".")[0]
    return package in ("gradaccum", "gradaccum_torch", "contextlib", "torch")


class ChangedRateWarning(Extension):
    """Warns if a learning rate changes inside a window, for example because a scheduler
    steps after each micro-batch.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, warn: Warnings) -> None:
        self._optimizer = optimizer
        self._warn = warn
        self._rates: list[object] | None = None
        """The learning rates at the beginning of the window. After `allow_change` was
        called or a checkpoint was loaded, this is None until the next window begins, so
        that a change of a learning rate causes no warning.
        """

    def micro_batch_added(self, micro_batch: MicroBatch, weight: float) -> None:
        rates = [rate_mark(group.get("lr")) for group in self._optimizer.param_groups]
        if micro_batch.is_first:
            self._rates = rates
        elif self._rates not in (None, rates):
            self._warn(kit.RATE_MOVED)

    def allow_change(self) -> None:
        """Allow learning rates to change in the open window without a warning. Called
        after a wrapped scheduler has stepped, or after a parameter was added, replaced,
        cast, frozen or unfrozen.
        """
        self._rates = None

    def load_state_dict(self, entries: dict[str, Any]) -> None:
        self._rates = None


def rate_mark(rate: object) -> object:
    """Return a value that changes whenever the learning rate changes. If the rate is a
    tensor, the value consists of the tensor's id and version, because reading the
    tensor would wait for the device.
    """
    return (id(rate), version(rate)) if isinstance(rate, Tensor) else rate


class LeftoverLoopWarning(Extension):
    """Warns if the user's loop most likely still calls ``step`` inside an ``if``, as a
    loop without gradaccum does. Such a loop runs as many backward passes before each
    ``step`` as a window has micro-batches. The warning is issued if each of the first
    two ``step`` calls comes after exactly this number of passes, and the number is at
    least 3.

    If the number is 2, this class issues no warning, because a GAN's discriminator
    normally has two losses, and therefore two backward passes per ``step``. In this
    case, `DividedLossWarning` issues the same warning if both losses were divided by 2.

    There is also no warning if the user has passed a weight, because `Window.weigh` and
    `Window.backward` warn if a weight is passed for each of several losses.
    """

    def __init__(self, warn: Warnings) -> None:
        self._warn = warn
        self._steps = 0

    def micro_batch_added(self, micro_batch: MicroBatch, weight: float) -> None:
        if self.is_finished:
            return
        self._steps += 1
        passes = micro_batch.passes
        is_other_loop = passes < 3 or passes != micro_batch.window_size
        if is_other_loop or micro_batch.is_weighed:
            self.is_finished = True
        elif self._steps == 2:
            self._warn(LEFTOVER_LOOP.format(passes=passes))
            self.is_finished = True


class NonFiniteLossWarning(Extension):
    """Warns about a loss that is not finite, on the worker that computed the loss."""

    def __init__(
        self, window_loss: WindowLoss, place: tuple[int, int], warn: Warnings
    ) -> None:
        self._window_loss = window_loss
        self._place = place
        self._warn = warn
        self._is_due = False

    def numbers(self) -> list[float]:
        self._is_due = self._window_loss.has_non_finite_loss()
        return []

    def reduced(self, numbers: list[float]) -> None:
        if self._is_due:
            self._warn(NON_FINITE_LOSS.format(*self._place))


def is_divided_by(division: Division | None, steps: int, reduction: str) -> bool:
    """True if the user has most likely made the mistake of dividing a loss by `steps`,
    the number of micro-batches in a window. This is assumed if the last operation on
    the loss was a division by `steps`. Such a division is not a mistake in three cases:

    - The reduction is ``"sum"``, so gradaccum itself does not divide.
    - The dividend is a sum of exactly `steps` terms, so the quotient is their mean.
    - The reduction is ``"mean"``, and every term of the dividend is itself a sum over
      items. The user may have divided by the number of items, to compute the mean over
      the items, and this number may happen to equal `steps`.
    """
    if division is None or not math.isclose(division.divisor, steps):
        return False
    makes_mean = division.of_sums and reduction == "mean"
    return division.terms != steps and not makes_mean and reduction != "sum"


class DividedLossWarning(Extension):
    """Warns if the user has most likely divided every loss of a micro-batch by the
    number of micro-batches in the window. This would make the gradient too small,
    because gradaccum divides by this number too. Only the first window is checked.

    If the micro-batch has one loss, the warning asks the user to delete the division.
    If the micro-batch has as many losses as the window has micro-batches, the warning
    is the same as in `LeftoverLoopWarning`, because the loop most likely calls ``step``
    inside an ``if``. With any other number of losses, there is no warning.
    """

    def __init__(self, options: Options, warn: Warnings) -> None:
        size = known_window_size(options, 0)
        self._steps = size if isinstance(size, int) else 1
        self._reduction = options.reduction
        self._warn = warn
        self.is_finished = self._steps == 1

    def loss_given(self, loss: Tensor, micro_batch: MicroBatch) -> None:
        """Called before the backward pass of a loss that the user has passed. Record
        whether the user has most likely divided this loss by the number of
        micro-batches, so that `micro_batch_added` can issue the warning.
        """
        if self.is_finished:
            return
        if is_divided_by(last_division(loss), self._steps, self._reduction):
            micro_batch.divided_losses += 1

    def micro_batch_added(self, micro_batch: MicroBatch, weight: float) -> None:
        losses = len(micro_batch.losses)
        if micro_batch.divided_losses != losses:
            return
        if losses == 1:
            self._warn(f"gradaccum: {kit.DIVIDED_LOSS.format(steps=self._steps)}")
        elif losses == self._steps:
            self._warn(LEFTOVER_LOOP.format(passes=losses))

    def window_closed(self, state: Fields, options: Options) -> None:
        self.is_finished = True

    def load_state_dict(self, entries: dict[str, Any]) -> None:
        self.is_finished = True
