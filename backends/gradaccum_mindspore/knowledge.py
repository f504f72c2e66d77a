"""What a window knows besides its gradient: its loss and, if asked for, the noise of its gradient; each a Parameter.

A micro-batch whose loss nobody tells must cost nothing. So it writes nothing, and the sum of losses has beside it the weight of the
micro-batches that told theirs: if that is not the window's weight at its end, some loss is missing, and the window's is NaN.

The methods with ``compiled_`` in their name are for the compiler to follow. They only compute, so that every value can be read before the
first write, except `compiled_see_first`, the body of a branch of its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops

from gradaccum.kit import (
    Fields,
    Options,
    State,
    add_loss,
    contribution,
    first_seen,
    forget_window,
    is_first,
    joined_noise,
    noise_scale,
    noise_shares,
    select,
    window_loss,
    window_seen,
)
from gradaccum_mindspore.norm import norm_over
from gradaccum_mindspore.sums import hidden_parameter, where
from gradaccum_mindspore.types import DType, Sums

LOSS, NOISE = "loss", "noise"
"""The ends of the Parameters' names."""
NO_LOSS = (0.0, 0.0, math.nan)
NO_NOISE = (0.0, 0.0, 0.0, 0.0, 0.0)


class Known(NamedTuple):
    """The values of both Parameters, in Python numbers."""

    loss: Sequence[float]
    noise: Sequence[float] | None
    """None where the noise is not measured."""


class Knowledge(nn.Cell):  # type: ignore[misc]
    """The loss and the noise of one accumulation's windows.

    Args:
        prefix: the start of the Parameters' names.
        options: the checked options.
        float_dtype: dtype of `State.weight`, and of these.
    """

    def __init__(self, prefix: str, options: Options, float_dtype: DType) -> None:
        super().__init__(auto_prefix=False)
        self.options = options._replace(steps=None, scaler=None)
        self.float_dtype = float_dtype
        self.loss = hidden_parameter(Tensor(NO_LOSS, float_dtype), f"{prefix}.{LOSS}")
        """(sum of the open window's losses, weight of the micro-batches that told theirs, the last closed window's loss)."""
        self.has_noise = options.noise_decay is not None
        if self.has_noise:
            self.noise = hidden_parameter(Tensor(NO_NOISE, float_dtype), f"{prefix}.{NOISE}")
            """The fields of `gradaccum.kit.Noise`, and how many first micro-batches its first two stand for."""
        self.one, self.zero, self.nan = (Tensor(number, float_dtype) for number in (1.0, 0.0, math.nan))

    def starts(self) -> dict[str, Sequence[float]]:
        """The value before the first micro-batch of what a checkpoint lacks that was saved without ``noise_scale=``, by its name."""
        return {self.noise.name: NO_NOISE} if self.has_noise else {}

    def pull(self) -> Known:
        """Both values."""
        return Known(self.loss.tolist(), self.noise.tolist() if self.has_noise else None)

    def push(self, known: Known) -> None:
        """Write both values."""
        self._assign(self.loss, known.loss)
        if known.noise is not None:
            self._assign(self.noise, known.noise)

    def add_loss(self, loss: float, weight: float, adds: bool) -> None:
        """A micro-batch told its loss; `adds`: whether its gradient was added."""
        total, told, last = self.loss.tolist()
        self._assign(self.loss, (add_loss(total, loss, weight, adds, self.options, select), told + weight if adds else told, last))

    def needs_first(self, state: State) -> bool:
        """Whether the sum's norm is wanted now, after a micro-batch: it is the first of its window to have added something."""
        return self.has_noise and bool(is_first(self.noise.tolist()[:4], state))

    def see_first(self, state: State, norm: float) -> None:
        """The norm of the sum that `needs_first` asked for."""
        self._assign(self.noise, (*first_seen(self.noise.tolist()[:4], state, norm, select), 1.0))

    def after(self, state: State, grad_norm: float) -> Known:
        """The values after a window with this state and norm."""
        total, told, _ = self.loss.tolist()
        loss = window_loss(total if told == state.weight else math.nan, state, self.options, select)
        if not self.has_noise:
            return Known((0.0, 0.0, loss), None)
        *noise, firsts = self.noise.tolist()
        return Known((0.0, 0.0, loss), (*window_seen(noise, state, grad_norm, self.options, select, firsts), 0.0))

    def forgotten(self) -> Known:
        """The values after a discard."""
        *_, last = self.loss.tolist()
        return Known((0.0, 0.0, last), (*forget_window(self.noise.tolist()[:4]), 0.0) if self.has_noise else None)

    def results(self) -> tuple[float, float]:
        """The loss and the noise scale of a `StepResult`."""
        scale = float(noise_scale(self.noise.tolist()[:4], select)) if self.has_noise else math.nan
        return self.loss.tolist()[2], scale

    def shares(self, state: State) -> list[float]:
        """The part of this worker of what the workers add up."""
        total, told, _ = self.loss.tolist()
        loss = total if told == state.weight else math.nan
        if not self.has_noise:
            return [loss]
        return [loss, *noise_shares(self.noise.tolist()[:4], select)]

    def push_joined(self, state: State, shares: Sequence[float]) -> None:
        """Write the sums of the workers' `shares`; `state` is that of all."""
        *_, last = self.loss.tolist()
        self._assign(self.loss, (shares[0], state.weight, last))
        if self.has_noise:
            _, weight, squares, firsts = shares
            self._assign(self.noise, (*joined_noise(self.noise.tolist()[:4], weight, squares, select), firsts))

    def compiled_told(self, loss: Tensor, weight: Tensor, adds: Tensor) -> Tensor:
        """The value of `loss` after a micro-batch."""
        # A weighted mean's parts are multiplied by the weight, so that its weight stands there as 1.
        parts = ops.stack((loss, self.one if self.options.reduction == "mean" else weight, self.zero))
        return add_loss(self.loss.value(), parts, weight, adds, self.options, where)

    def compiled_certain(self, loss: Tensor, weight: Tensor | None) -> Tensor:
        """What a micro-batch that is certainly added adds to `loss`; its weight is 1 if it is None."""
        part = loss if weight is None else contribution(weight, self.options) * loss
        return ops.stack((part, self.one if weight is None else weight, self.zero))

    def compiled_after(self, state: Fields, grad_norm: Tensor) -> tuple[Tensor, Tensor | None]:
        """The values after a window with this state and norm."""
        _, _, _, weight, _, _, _ = state
        value = self.loss.value()
        total = where(value[1] == weight, value[0], self.nan)
        loss = where(weight > 0, window_loss(total, state, self.options, where), self.nan)
        noise = None
        if self.has_noise:
            seen = self.noise.value()
            fields = window_seen((seen[0], seen[1], seen[2], seen[3]), state, grad_norm, self.options, where, seen[4])
            noise = self.stacked(fields, self.zero)
        return ops.stack((self.zero, self.zero, loss.astype(self.float_dtype))), noise

    def compiled_forgotten(self) -> tuple[Tensor, Tensor | None]:
        """The values after a discard."""
        noise = None
        if self.has_noise:
            seen = self.noise.value()
            noise = self.stacked(forget_window((seen[0], seen[1], seen[2], seen[3])), self.zero)
        return ops.stack((self.zero, self.zero, self.loss.value()[2])), noise

    def compiled_write(self, loss: Tensor, noise: Tensor | None) -> bool:
        """Assign both."""
        ops.assign(self.loss, loss)
        if noise is not None:
            ops.assign(self.noise, noise)
        return True

    def compiled_needs_first(self, state: Fields) -> Tensor:
        """`needs_first`, a bool Tensor of shape ()."""
        seen = self.noise.value()
        return is_first((seen[0], seen[1], seen[2], seen[3]), state)

    def compiled_see_first(self, sums: Sums, weight: Parameter, loss_scale: Parameter) -> bool:
        """Measure the sum that `needs_first` asked for. Reads Parameters alone: the runtime would keep a copy of any other value."""
        held, scale, seen = weight.value(), loss_scale.value().astype(self.float_dtype), self.noise.value()
        zero = self.zero
        # Only the weight and the scale of the state are read.
        state = (zero, zero, zero, held, zero > 1, scale, zero)
        fields = first_seen((seen[0], seen[1], seen[2], seen[3]), state, norm_over(sums, held * scale), where)
        ops.assign(self.noise, self.stacked(fields, self.one))
        return True

    def compiled_shares(self, state_weight: Tensor) -> tuple[Tensor, ...]:
        """`shares`, in compiled code."""
        value = self.loss.value()
        loss = where(value[1] == state_weight, value[0], self.nan)
        if not self.has_noise:
            return (loss,)
        seen = self.noise.value()
        weight, squares, count = noise_shares((seen[0], seen[1], seen[2], seen[3]), where)
        return loss, weight, squares, count

    def compiled_push_joined(self, numbers: Tensor, place: int) -> bool:
        """`push_joined`, of the workers' `numbers` from `place` on; the first number is the weight of all."""
        ops.assign(self.loss, ops.stack((numbers[place], numbers[0], self.loss.value()[2])))
        if self.has_noise:
            seen = self.noise.value()
            fields = joined_noise((seen[0], seen[1], seen[2], seen[3]), numbers[place + 1], numbers[place + 2], where)
            ops.assign(self.noise, self.stacked(fields, numbers[place + 3]))
        return True

    def stacked(self, fields: tuple[Tensor, Tensor, Tensor, Tensor], firsts: Tensor) -> Tensor:
        """The value of `noise`."""
        return ops.stack([field.astype(self.float_dtype) for field in (*fields, firsts)])

    def _assign(self, parameter: Parameter, values: Sequence[float]) -> None:
        if not np.array_equal(parameter.tolist(), values, equal_nan=True):
            with np.errstate(over="ignore"):
                dtype = np.float64 if self.float_dtype == ms.float64 else np.float32
                ops.assign(parameter, Tensor.from_numpy(np.array(values, dtype)))
