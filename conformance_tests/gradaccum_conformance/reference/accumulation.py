"""Gradient accumulation over a list of micro-batches, in plain Python ``if`` and NumPy.

Scalars are rounded to float32 after each operation, as every backend's state holds
them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import chain
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
    """w_i g_i for ``"mean"``, else g_i; times the loss scale. Empty if it is dropped."""
    weight: float
    dropped: bool
    """Its gradient is not finite, and the window leaves it out."""
    loss: float
    """Not scaled; NaN if it is not known."""


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
        self.optimizer = optimizer
        self.options = options
        self.workers = workers
        self.model = optimizer.parameters
        if options.master_weights:
            optimizer.parameters = {
                name: p.astype(np.float32) if is_half(p) else p
                for name, p in self.model.items()
            }
        self.window: list[MicroBatch] = []
        self.half_made = False
        """An exception ended the last update."""
        self.optimizer_step = 0
        self.skipped_windows = 0
        self.growth_tracker = 0
        self.loss_scale = float32(options.scale_rule.init_scale)
        self.grad_norm = 0.0
        self.loss = math.nan
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
        by_weight = isinstance(self.options.steps, UntilWeight)
        if size is not None and size <= (
            self.weight() if by_weight else len(self.window)
        ):
            self.flush()

    def flush(self, denominator: float | None = None) -> None:
        """Close the window: one update, or none. With other workers it is that of all,
        and every one of them must come here.

        The sum is divided by `denominator`, if one is given.
        """
        self._require_whole()
        if denominator is not None:
            denominator = require_denominator(denominator, self.options)
        if self.workers is not None:
            self.window = list(chain(*self.workers.gather(self.window)))
        if not self.window:
            self._note()
            return
        if denominator is None:
            by_weight = self.options.reduction != "sum"
            denominator = (by_weight and self.weight()) or 1.0
        self._close(denominator)

    def discard(self) -> None:
        """Forget the window, and that its update was half made."""
        self.window = []
        self.half_made = False
        self._note()

    def resume(self, fields: State, options: Options) -> None:
        """Go on under other options, with the loss scale and the growth tracker of
        `fields`.
        """
        self.options = options
        self.loss_scale = fields.loss_scale
        self.growth_tracker = fields.growth_tracker
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
        return State(
            len(self.window),
            self.optimizer_step,
            self.skipped_windows,
            self.weight(),
            any(m.dropped for m in self.window),
            self.loss_scale,
            self.growth_tracker,
        )

    def _close(self, denominator: float) -> None:
        options = self.options
        limits = self._limits()
        self.divisor = self._rounded(self.loss_scale * denominator)
        in_range = limits.tiny <= self.divisor <= limits.max
        gradient = {
            name: array / (self.divisor if in_range else 1.0)
            for name, array in self.total().items()
        }
        ignores = options.on_overflow == "ignore"
        clip_norm = options.clip_norm or math.inf
        skip_norm = options.skip_norm or math.inf
        measures = not ignores or min(clip_norm, skip_norm) < math.inf
        finite = all(
            np.isfinite(array).all() for array in self._cast(gradient).values()
        )
        bad = not in_range or (measures and not finite)
        self.grad_norm = norm(gradient) if measures and not bad else math.nan
        if bad:
            self.grad_norm = math.inf
        clips = clip_norm < self.grad_norm < math.inf
        if clips:
            self.divisor = self.divisor * self.grad_norm / clip_norm
        applied = (
            self.weight() > 0
            and (not bad or (ignores and in_range))
            and not self.grad_norm > skip_norm
        )
        if applied and clips and self.divisor > limits.max:
            applied = False
            bad = True
        self.loss = self._loss(denominator)
        self.half_made = True
        if applied:
            self._update(gradient, clip_norm / self.grad_norm if clips else 1.0)
        else:
            self.skipped_windows += 1
        overflow = bad or any(m.dropped for m in self.window)
        self._move_scale(overflow, empty=self.weight() == 0)
        self.window = []
        self.half_made = False
        self._note(applied=applied, skipped=not applied, overflow=overflow)

    def _update(self, gradient: Arrays, factor: float) -> None:
        clipped = {
            name: array * array.dtype.type(factor) for name, array in gradient.items()
        }
        self.optimizer.step(self._cast(clipped))
        for name, p in self.model.items():
            p[...] = self.optimizer.parameters[name]
        self.optimizer_step += 1

    def _require_whole(self) -> None:
        if self.half_made:
            raise half_made_error()

    def _loss(self, denominator: float) -> float:
        """That of the window as one large batch."""
        losses = [
            m.loss * (m.weight if self.options.reduction == "mean" else 1.0)
            for m in self.window
            if m.weight > 0 and not m.dropped
        ]
        return sum(losses) / denominator if losses else math.nan

    def _micro_batch(
        self, gradient: Mapping[str, Array | None], weight: float, loss: float
    ) -> MicroBatch:
        factor = weight if self.options.reduction == "mean" else 1.0
        contribution = {}
        for name, g in gradient.items():
            if weight > 0 and g is not None:
                dtype = self._dtype(self.model[name])
                term = np.asarray(g, dtype) * dtype.type(factor)
                contribution[name] = term.astype(dtype)
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
            lowered = float32(self.loss_scale * rule.backoff_factor)
            self.loss_scale = max(lowered, float32(rule.min_scale))
            self.growth_tracker = 0
        elif not empty:
            self.growth_tracker += 1
        if self.growth_tracker >= rule.growth_interval:
            raised = float32(self.loss_scale * rule.growth_factor)
            raised = min(raised, float32(rule.max_scale))
            if math.isfinite(raised):
                self.loss_scale = raised
            self.growth_tracker = 0

    def _size(self) -> Any:
        sizes = self.options.steps
        if isinstance(sizes, UntilWeight):
            sizes = sizes.weight
        if isinstance(sizes, tuple):
            return [size for first, size in sizes if first <= self.optimizer_step][-1]
        if callable(sizes):
            size = sizes(self.optimizer_step)
            return require_steps(size, self.optimizer_step, sizes)
        return sizes

    def _note(
        self, *, applied: bool = False, skipped: bool = False, overflow: bool = False
    ) -> None:
        self.result = StepResult(
            applied,
            skipped,
            overflow,
            self.grad_norm,
            self.loss_scale,
            len(self.window),
            self.optimizer_step,
            self.loss,
        )


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
