"""Gradient accumulation over a list of micro-batches, in plain Python ``if`` and NumPy.

Scalars are rounded to float32 after each operation, as every backend's state holds
them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from gradaccum import StepResult
from gradaccum.kit import (
    Options,
    State,
    UntilWeight,
    given_weight,
    half_made_error,
    require_denominator,
    require_steps,
    use_of_weights,
)
from gradaccum_conformance.reference.optimizers import NumpyOptimizer
from gradaccum_conformance.reference.workers import Workers
from gradaccum_conformance.specs import Array, Arrays


class MicroBatch(NamedTuple):
    """One micro-batch of the open window."""

    contribution: Arrays
    """w_i g_i for ``"mean"``, else g_i; times the loss scale."""
    weight: float
    dropped: bool
    """Its gradient is not finite, and the window leaves it out."""
    loss: float
    """Not scaled; NaN if nobody told it."""

    @property
    def counts(self) -> bool:
        """Whether it is a part of the window's sum."""
        return self.weight > 0 and not self.dropped


class ReferenceAccumulation:
    """An optimizer that runs once per window.

    Args:
        optimizer: the inner optimizer.
        options: the validated options.
        workers: those that share the window; None: this process is alone.
    """

    def __init__(
        self,
        optimizer: NumpyOptimizer,
        options: Options,
        workers: Workers | None = None,
    ) -> None:
        self.optimizer, self.options, self.workers = optimizer, options, workers
        self.model = optimizer.parameters
        if options.master_weights:
            optimizer.parameters = {
                name: p.astype(np.float32) if is_half(p) else p
                for name, p in self.model.items()
            }
        self.window: list[MicroBatch] = []
        self.half_made = False
        """An exception ended the last update."""
        self.optimizer_step = self.skipped_windows = self.growth_tracker = 0
        self.loss_scale = float32(options.scale_rule.init_scale)
        self.grad_norm, self.loss = 0.0, math.nan
        self.divisor = 1.0
        """What the last window's sum was divided by, clipping included."""
        self._note()

    def step(
        self,
        gradient: Mapping[str, Array | None],
        weight: float | None = None,
        loss: float = math.nan,
    ) -> None:
        """Take one micro-batch's gradient, and its loss; None counts as zero. At the
        window's end, close it.
        """
        self._require_whole()
        weight = given_weight(weight, use_of_weights(self.options))
        micro_batch = self._micro_batch(gradient, weight, loss)
        size = self._size()  # A bad one is refused before the micro-batch counts.
        self.window.append(micro_batch)
        self._note(overflow=micro_batch.dropped)
        held = (
            self.weight()
            if isinstance(self.options.steps, UntilWeight)
            else len(self.window)
        )
        if size is not None and held >= size:
            self.flush()

    def flush(self, denominator: float | None = None) -> None:
        """Close the window: one update, or none. With other workers it is that of all,
        and every one of them must come here.

        The sum is divided by `denominator`, if one is given.
        """
        self._require_whole()
        if denominator is not None:
            denominator = require_denominator(denominator, self.options)
        windows = (
            [self.window] if self.workers is None else self.workers.gather(self.window)
        )
        self.window = [micro_batch for window in windows for micro_batch in window]
        if not self.window:
            return self._note()
        denominator = self._denominator() if denominator is None else denominator
        divisor = self._rounded(self.loss_scale * denominator)
        normal = self._limits().tiny <= divisor <= self._limits().max
        gradient = {
            name: array / (divisor if normal else 1.0)
            for name, array in self.total().items()
        }
        handed_over = self._cast(gradient)
        bad_total = not normal or not all(
            np.isfinite(array).all() for array in handed_over.values()
        )
        self.loss = self._loss(denominator)
        self.grad_norm = math.inf if bad_total else norm(gradient)
        if not self._measures():
            self.grad_norm, bad_total = math.nan if normal else math.inf, not normal
        applied = self._may_apply(bad_total, normal)
        limit = self.options.clip_norm or math.inf
        if (
            applied
            and not bad_total
            and divisor * self.grad_norm / limit > self._limits().max
        ):
            applied, bad_total = False, True
        overflow = bad_total or any(m.dropped for m in self.window)
        self.half_made = True
        clips = applied and limit < self.grad_norm < math.inf
        self.divisor = divisor * self.grad_norm / limit if clips else divisor
        if applied:
            self.optimizer.step(self._cast(self._clipped(gradient)))
            for name, p in self.model.items():
                p[...] = self.optimizer.parameters[name]
            self.optimizer_step += 1
        else:
            self.skipped_windows += 1
        self._move_scale(overflow, empty=self.weight() == 0)
        self.window, self.half_made = [], False
        self._note(applied=applied, skipped=not applied, overflow=overflow)

    def discard(self) -> None:
        """Forget the window, and that its update was half made."""
        self.window, self.half_made = [], False
        self._note()

    def resume(self, fields: State, options: Options) -> None:
        """Go on under other options, with the loss scale and the growth tracker of
        `fields`.
        """
        self.options, self.loss_scale, self.growth_tracker = (
            options,
            fields.loss_scale,
            fields.growth_tracker,
        )
        self._note()

    def weight(self) -> float:
        """Sum of the weights of the micro-batches that were not dropped."""
        total = 0.0
        for micro_batch in self.window:
            if not micro_batch.dropped:
                total = self._rounded(total + micro_batch.weight)
        return total

    def total(self) -> Arrays:
        """The sum of the contributions, in the accumulators' dtype."""
        total = {
            name: np.zeros(p.shape, self._dtype(p)) for name, p in self.model.items()
        }
        for micro_batch in self.window:
            for name, array in micro_batch.contribution.items():
                total[name] += array
        return total

    def state(self) -> State:
        """The seven fields."""
        overflow = any(m.dropped for m in self.window)
        counters = (len(self.window), self.optimizer_step, self.skipped_windows)
        return State(
            *counters, self.weight(), overflow, self.loss_scale, self.growth_tracker
        )

    def _require_whole(self) -> None:
        if self.half_made:
            raise half_made_error()

    def _loss(self, denominator: float) -> float:
        """That of the window as one large batch."""
        losses = [
            m.loss * (m.weight if self.options.reduction == "mean" else 1.0)
            for m in self.window
            if m.counts
        ]
        return sum(losses) / denominator if losses else math.nan

    def _measures(self) -> bool:
        """Whether anything asks for the norm."""
        asked = (
            self.options.clip_norm,
            self.options.skip_norm,
        )
        return self.options.on_overflow != "ignore" or any(
            each is not None for each in asked
        )

    def _micro_batch(
        self, gradient: Mapping[str, Array | None], weight: float, loss: float
    ) -> MicroBatch:
        factor = weight if self.options.reduction == "mean" else 1.0
        contribution: Arrays = {}
        if weight > 0:
            for name, g in gradient.items():
                if g is not None:
                    dtype = self._dtype(self.model[name])
                    contribution[name] = (
                        np.asarray(g, dtype) * dtype.type(factor)
                    ).astype(dtype)
        finite = all(np.isfinite(array).all() for array in contribution.values())
        dropped = self.options.on_overflow == "drop_micro_batch" and not finite
        return MicroBatch(
            {} if dropped else contribution, self._rounded(weight), dropped, loss
        )

    def _rounded(self, value: float) -> float:
        return value if self._limits().dtype == np.float64 else float32(value)

    def _limits(self) -> Any:
        """The largest and the smallest normal number of the dtype that weights and
        divisions have.
        """
        double = any(self._dtype(p) == np.float64 for p in self.model.values())
        return np.finfo(np.float64 if double else np.float32)

    def _dtype(self, p: Array) -> np.dtype[Any]:
        return np.dtype(
            self.options.accumulate_dtype or (np.float32 if is_half(p) else p.dtype)
        )

    def _denominator(self) -> float:
        return 1.0 if self.options.reduction == "sum" else self.weight() or 1.0

    def _may_apply(self, bad_total: bool, normal: bool) -> bool:
        ignoring = self.options.on_overflow == "ignore" and normal
        if (bad_total and not ignoring) or self.weight() == 0:
            return False
        return (
            self.options.skip_norm is None or self.grad_norm <= self.options.skip_norm
        )

    def _clipped(self, gradient: Arrays) -> Arrays:
        limit = self.options.clip_norm
        factor = (
            limit / self.grad_norm
            if limit is not None and limit < self.grad_norm < math.inf
            else 1.0
        )
        return {
            name: array * array.dtype.type(factor) for name, array in gradient.items()
        }

    def _cast(self, gradient: Arrays) -> Arrays:
        """In the dtype of the inner optimizer's parameters. A large sum may leave
        float16's range.
        """
        with np.errstate(over="ignore"):
            return {
                name: array.astype(self.optimizer.parameters[name].dtype)
                for name, array in gradient.items()
            }

    def _move_scale(self, overflow: bool, *, empty: bool) -> None:
        rule = self.options.scale_rule
        if overflow:
            self.loss_scale = max(
                float32(self.loss_scale * rule.backoff_factor), float32(rule.min_scale)
            )
            self.growth_tracker = 0
        elif not empty:
            self.growth_tracker += 1
            if self.growth_tracker >= rule.growth_interval:
                grown = min(
                    float32(self.loss_scale * rule.growth_factor),
                    float32(rule.max_scale),
                )
                self.loss_scale = grown if math.isfinite(grown) else self.loss_scale
                self.growth_tracker = 0

    def _size(self) -> Any:
        sizes = (
            self.options.steps.weight
            if isinstance(self.options.steps, UntilWeight)
            else self.options.steps
        )
        if isinstance(sizes, tuple):
            return [size for first, size in sizes if first <= self.optimizer_step][-1]
        return (
            require_steps(sizes(self.optimizer_step), self.optimizer_step, sizes)
            if callable(sizes)
            else sizes
        )

    def _note(
        self, *, applied: bool = False, skipped: bool = False, overflow: bool = False
    ) -> None:
        last = (
            self.grad_norm,
            self.loss_scale,
            len(self.window),
            self.optimizer_step,
            self.loss,
        )
        self.result = StepResult(applied, skipped, overflow, *last)


def float32(value: float) -> float:
    """Rounded to float32; what is above its range becomes inf."""
    with np.errstate(over="ignore"):
        return float(np.float32(value))


def is_half(p: Array) -> bool:
    """Whether it is float16 or bfloat16."""
    return p.dtype.itemsize == 2


def norm(gradient: Arrays) -> float:
    """Global 2-norm, in float64 of elements scaled by the largest, so that no square
    overflows.
    """
    largest = max(
        (float(np.abs(array).max()) for array in gradient.values() if array.size),
        default=0.0,
    )
    if largest == 0:
        return 0.0
    return largest * math.sqrt(
        sum(
            float(np.square(np.asarray(array, np.float64) / largest).sum())
            for array in gradient.values()
        )
    )
