"""The events of a window in PyNative: the state is read into Python numbers, moved by the same transitions and written back.

An operator costs more than reading a scalar there, so what a Python ``if`` can leave out is left out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from mindspore import Tensor

from gradaccum import Decision, Options, State, accumulate, close, contribution, decide, discard, select
from gradaccum_mindspore import eager_sums
from gradaccum_mindspore.accumulator import fits
from gradaccum_mindspore.storage import Storage
from gradaccum_mindspore.window_size import window_size

FLOAT16_MAX = 65504.0


class EagerWindow:
    """Micro-batches and window ends over a `Storage`, in Python."""

    def __init__(self, storage: Storage, options: Options) -> None:
        self.storage = storage
        self.options = options

    def add(self, gradients: tuple[Any, ...], weight: float) -> State:
        """Take in one micro-batch of checked gradients; returns the state after it, written."""
        state = self.storage.pull()
        factor = contribution(weight, self.options)
        finite = weight == 0 or self.options.on_overflow == "skip_window" or self.finite(gradients, factor)
        usable = gradients if finite and weight > 0 else (None,) * len(gradients)
        eager_sums.add(self.storage.sums, usable, factor)
        after = self.storage.push(accumulate(state, weight, finite, select), state)
        if not finite:
            self.storage.push_event(False, False, True, micro_step=after.micro_step)
        return after

    def finite(self, gradients: tuple[Any, ...], factor: float) -> bool:
        """Whether what would be added is free of inf and NaN."""
        parts = zip(self.storage.sums, gradients, strict=True)
        return all(g is None or eager_sums.all_finite(eager_sums.scaled(g, factor, s.dtype)) for s, g in parts)

    def size(self) -> int | None:
        """Micro-batches in the open window when it is full; None: the caller closes it. Raises if the user's function gives none."""
        if not self.storage.varies:
            return cast("int | None", self.options.steps)
        size = window_size(self.options.steps, self.storage.optimizer_step.item())
        self.storage.push_size(cast(int, size))
        return size

    def close(self, state: State, apply: Callable[[Any], Any]) -> None:
        """End the window: call `apply` with its gradients, or not at all."""
        norm, finite = eager_sums.measure(self.storage.sums, self.storage.float_dtype)
        finite = finite and self.in_range(
            Decision(*decide(state, norm, finite, self.options._replace(clip_norm=None), select, self.storage.largest))
        )
        decision = Decision(*decide(state, norm, finite, self.options, select, self.storage.largest))
        if decision.apply:
            apply(self.gradients(decision.divisor))
        eager_sums.clear(self.storage.sums)
        self.storage.push(close(state, decision.apply, decision.overflow, self.options, select), state)
        self.storage.push_event(decision.apply, not decision.apply, decision.overflow, decision.grad_norm)

    def in_range(self, unclipped: Decision) -> bool:
        """Whether the window's gradient is finite in the dtypes of the inner optimizer."""
        # No element exceeds the norm, so the elements themselves are seldom looked at.
        if unclipped.grad_norm * self.storage.inner_scale <= FLOAT16_MAX:
            return True
        sums, handed = self.storage.sums, self.storage.handed
        divisor = Tensor(unclipped.divisor / self.storage.inner_scale, self.storage.float_dtype)
        return all(fits(sums[i], divisor, handed[i]).asnumpy().item() for i in self.storage.narrowed)

    def gradients(self, divisor: float) -> Any:
        """What the inner optimizer is given."""
        return eager_sums.divided(self.storage.sums, divisor / self.storage.inner_scale, self.storage.handed, self.storage.float_dtype)

    def discard(self) -> None:
        """Forget the open window."""
        eager_sums.clear(self.storage.sums)
        state = self.storage.pull()
        self.storage.push(discard(state), state)
        self.storage.push_event(False, False, False)
