"""The events of a window in PyNative: the state is read into Python numbers, moved by the same transitions and written back.

An operator costs more than reading a scalar there, so what a Python ``if`` can leave out is left out.
"""

from __future__ import annotations

from typing import Any, cast

from mindspore import Tensor

from gradaccum import UsageError
from gradaccum.kit import Decision, Options, State, accumulate, close, contribution, decide, discard, divisor, explain, select, usable
from gradaccum_mindspore import pynative_sums
from gradaccum_mindspore.masters import Update
from gradaccum_mindspore.sizes import window_size
from gradaccum_mindspore.state import Storage
from gradaccum_mindspore.sums import add_into, fits

FLOAT16_MAX = 65504.0


class EagerWindow:
    """Micro-batches and window ends over a `Storage`, in Python."""

    def __init__(self, storage: Storage, options: Options) -> None:
        self.storage = storage
        self.options = options

    def add(self, gradients: tuple[Any, ...], weight: float, size: int | None) -> State:
        """Take in one micro-batch of checked gradients; returns the state after it, written.

        If this raises, it can be tried again: the state is the old one, or, where some sums hold the gradient and some do not, the
        window is spoilt, so that its end skips it.

        Raises:
            UsageError: the window has its `size` already, as its update raised.
        """
        state = self.storage.pull()
        require_room(state, size)
        factor = contribution(weight, self.options)
        finite = weight == 0 or self.options.on_overflow == "skip_window" or self.finite(gradients, factor)
        added = gradients if usable(state, weight, finite) else (None,) * len(gradients)
        begun = False
        try:
            for total, part in pynative_sums.parts(self.storage.sums, added, factor):
                begun = True
                add_into(total, part)
            begun = True
            after = self.storage.push(accumulate(state, weight, finite, select), state)
            if not finite:
                self.storage.push_event(False, False, True, micro_step=after.micro_step)
        except BaseException:
            if begun:
                self.take_back(state)
            raise
        return after

    def take_back(self, state: State) -> None:
        """The state before a micro-batch of which some sums may hold a part."""
        (pynative_sums.spoil if state.micro_step else pynative_sums.clear)(self.storage.sums)
        self.storage.push(state, self.storage.pull())

    def finite(self, gradients: tuple[Any, ...], factor: float) -> bool:
        """Whether what would be added is free of inf and NaN."""
        parts = zip(self.storage.sums, gradients, strict=True)
        return all(g is None or pynative_sums.all_finite(pynative_sums.scaled(g, factor, s.dtype)) for s, g in parts)

    def size(self) -> int | None:
        """Micro-batches in the open window when it is full; None: the caller closes it. Raises if the user's function gives none."""
        if not self.storage.varies:
            return cast("int | None", self.options.steps)
        size = window_size(self.options.steps, self.storage.optimizer_step.item())
        self.storage.push_size(cast(int, size))
        return size

    def close(self, state: State, update: Update) -> None:
        """End the window: make the `update` with its gradients, or not at all.

        If this raises, the window is either open as before, and ``flush`` makes its update, or closed, if the update was made.
        """
        norm, finite = pynative_sums.measure(self.storage.sums, self.storage.float_dtype)
        finite = finite and self.in_range(norm, divisor(state, self.options, select))
        decision = Decision(*decide(state, norm, finite, self.options, select, self.storage.largest))
        before = update.witness.look() if decision.apply else None
        try:
            if decision.apply:
                update(self.gradients(decision.divisor))
            self.finish(state, decision)
        except BaseException:
            if before is None or update.witness.look() != before:
                update.round()
                self.finish(state, decision)
            raise

    def finish(self, state: State, decision: Decision) -> None:
        """Clear the sums and write the state after the window; once more does the same."""
        pynative_sums.clear(self.storage.sums)
        self.storage.push(close(state, decision.apply, decision.overflow, self.options, select), state)
        self.storage.push_event(decision.apply, not decision.apply, decision.overflow, decision.grad_norm)

    def in_range(self, norm: float, unclipped: float) -> bool:
        """Whether the window's gradient, divided by `unclipped` alone, is finite in the dtypes of the inner optimizer."""
        divides = unclipped / self.storage.inner_scale
        # No element exceeds the norm, so the elements themselves are seldom looked at.
        if norm <= FLOAT16_MAX * divides:
            return True
        sums, handed, operand = self.storage.sums, self.storage.handed, Tensor(divides, self.storage.float_dtype)
        return all(fits(sums[i], operand, handed[i]).asnumpy().item() for i in self.storage.narrowed)

    def gradients(self, divisor: float) -> Any:
        """What the inner optimizer is given."""
        return pynative_sums.divided(self.storage.sums, divisor / self.storage.inner_scale, self.storage.handed, self.storage.float_dtype)

    def discard(self) -> None:
        """Forget the open window, even if this is interrupted."""
        try:
            self.forget()
        except BaseException:
            self.forget()
            raise

    def forget(self) -> None:
        """Clear the sums and the state of the open window."""
        pynative_sums.clear(self.storage.sums)
        state = self.storage.pull()
        self.storage.push(discard(state), state)
        self.storage.push_event(False, False, False)


def require_room(state: State, size: int | None) -> None:
    """Raise `UsageError` if the window holds `size` micro-batches already."""
    if size is not None and state.micro_step >= size > 0:
        raise explain(
            UsageError,
            "gradients",
            expected="flush() or discard() first, as the window's update raised",
            found=f"a micro-batch more for a window of {size} that holds {state.micro_step}",
            fix="Write optimizer.flush() to make the update that is due.",
        )
