"""The open window in PyNative, where the core's transitions move the state as Python
numbers.

There an operator costs more than reading a scalar, so a Python ``if`` leaves out every
operator that it can.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import mindspore as ms
from mindspore import Tensor

from gradaccum import UsageError, kit
from gradaccum.kit import Decision, Options, Schedule, State, UntilWeight, explain
from gradaccum_mindspore import gradient_sum
from gradaccum_mindspore.extensions import Losses
from gradaccum_mindspore.gradient_sum import Gradients
from gradaccum_mindspore.state import Storage, window_size
from gradaccum_mindspore.update import Update

FLOAT16_MAX = 65504.0


class PyNativeWindow:
    """One window as Python numbers, over a `Storage`; `CompiledWindow` has the same
    methods.
    """

    def __init__(self, storage: Storage, options: Options) -> None:
        self.storage = storage
        self.options = options
        self.measures = kit.measures(options)

    def require_usable(self) -> None:
        """Raise unless the last update was made, or something was loaded since."""
        if self.storage.is_update_broken:
            raise kit.half_made_error()

    # A micro-batch.

    def size(self) -> Schedule:
        """Return the open window's size, or its weight; None: the caller closes it."""
        if not self.storage.size_varies:
            return self.options.steps
        size = window_size(self.options.steps, self.storage.optimizer_step.item())
        self.storage.push_size(size)
        return size

    def add(
        self,
        gradients: Gradients,
        weight: float,
        size: Schedule,
        loss: float | None = None,
    ) -> State:
        """Add one micro-batch of checked gradients, and its `loss` if it is known;
        return the state after it, which is written.

        If this raises, the state is the old one. If only some sums hold the gradient
        then, the window is marked invalid, and its end skips it.
        """
        state = self.storage.pull()
        require_room(state, size)
        factor = kit.contribution(weight, self.options)
        is_finite = self.is_finite(gradients, weight, factor)
        is_added = bool(kit.usable(state, weight, is_finite))
        losses = None if loss is None else self.storage.window_loss.read()
        has_begun = False
        try:
            if is_added:
                for total, gradient in zip(self.storage.sums, gradients, strict=True):
                    if gradient is None:
                        continue
                    part = gradient_sum.scaled(gradient, factor, total.dtype)
                    has_begun = True
                    gradient_sum.add_into(total, part)
            has_begun = True
            counted = kit.accumulate(state, weight, is_finite, kit.select)
            after = self.storage.push(counted, state)
            if not is_finite:
                self.storage.push_event(overflow=True, micro_step=after.micro_step)
            if loss is not None:
                self.storage.window_loss.add(loss, weight, is_added)
        except BaseException:
            if has_begun:
                self.take_back(state, losses)
            raise
        return after

    def is_finite(self, gradients: Gradients, weight: float, factor: float) -> bool:
        """True if the micro-batch is not to be dropped as an overflow."""
        if self.options.on_overflow != "drop_micro_batch" or weight == 0:
            return True
        return all(
            gradient is None
            or gradient_sum.all_finite(
                gradient_sum.scaled(gradient, factor, total.dtype)
            )
            for total, gradient in zip(self.storage.sums, gradients, strict=True)
        )

    def take_back(self, state: State, losses: Losses | None) -> None:
        """Put back the state and the losses before a micro-batch of which some sums may
        hold a part.
        """
        if losses is not None:
            self.storage.window_loss.write(losses)
        if state.micro_step:
            gradient_sum.mark_invalid(self.storage.sums)
        else:
            gradient_sum.clear(self.storage.sums)
        self.storage.push(state, self.storage.pull())

    # The end of a window.

    def close(
        self, state: State, update: Update, denominator: float | None = None
    ) -> None:
        """End the window: make the `update` with its gradients, divided by
        `denominator` if one is given, or not at all.

        If this raises before the inner optimizer is called, the window is open as
        before, and ``flush`` makes its update. If the inner optimizer raises, each
        further call raises until ``discard``, or until a checkpoint is loaded.
        """
        ending = state
        options = self.options
        if denominator is not None:
            fields, options = kit.with_denominator(
                state, denominator, options, kit.select
            )
            ending = self.storage.at_rest(fields)
        decision = self.decision(ending, options)
        losses = self.storage.window_loss.after_window(state, ending, options)
        self.carry_out(state, decision, losses, update)
        for extension in self.storage.extensions:
            extension.window_closed(state)

    def decision(self, ending: State, options: Options) -> Decision:
        norm = math.nan
        is_finite = True
        if self.measures:
            norm, is_finite = self.measure(ending, options)
        largest = self.storage.largest_number
        return Decision(
            *kit.decide(ending, norm, is_finite, options, kit.select, largest)
        )

    def measure(self, ending: State, options: Options) -> tuple[float, bool]:
        """Return the norm of the sums, and whether they and the gradients are
        finite.
        """
        norm, is_finite = gradient_sum.measure(
            self.storage.sums, self.storage.float_dtype
        )
        return norm, is_finite and self.fits(ending, options, norm)

    def fits(self, ending: State, options: Options, norm: float) -> bool:
        """True if the divided sums, not yet clipped, are finite in the inner
        optimizer's dtypes; `norm` is the sums'.
        """
        divisor = kit.divisor(ending, options, kit.select) / self.storage.inner_scale
        # No element exceeds the norm, so the elements themselves are seldom looked at.
        if norm <= FLOAT16_MAX * divisor:
            return True
        operand = Tensor(divisor, self.storage.float_dtype)
        return all(
            gradient_sum.fits(
                self.storage.sums[place], operand, self.storage.gradient_dtypes[place]
            ).item()
            for place in self.storage.narrowed
        )

    def carry_out(
        self, state: State, decision: Decision, losses: Losses, update: Update
    ) -> None:
        """Make the update, if that was decided, and begin the next window."""
        if decision.apply:
            update.require_effect()
            gradients = ms.mutable(self.gradients(decision.divisor))
            self.storage.is_update_broken = True
            update(gradients)
            self.storage.is_update_broken = False
        twice_if_interrupted(lambda: self.finish(state, decision, losses))

    def gradients(self, divisor: float) -> tuple[Tensor, ...]:
        return gradient_sum.divided(
            self.storage.sums,
            divisor / self.storage.inner_scale,
            self.storage.gradient_dtypes,
            self.storage.float_dtype,
        )

    def finish(self, state: State, decision: Decision, losses: Losses) -> None:
        """Clear the sums and write what follows; a second call does the same."""
        self.clear()
        self.storage.window_loss.write(losses)
        closed = kit.close(
            state, decision.apply, decision.overflow, self.options, kit.select
        )
        self.storage.push(closed, state)
        self.storage.push_event(
            decision.apply, not decision.apply, decision.overflow, decision.grad_norm
        )

    def clear(self) -> None:
        gradient_sum.clear(self.storage.sums)

    def flush(self, update: Update, denominator: float | None = None) -> bool:
        """Close the open window; returns whether there was one."""
        state = self.storage.pull()
        is_open = state.micro_step > 0
        if is_open:
            self.close(state, update, denominator)
        else:
            self.storage.push_event()
        return bool(is_open)

    def discard(self) -> None:
        """Forget the open window."""
        twice_if_interrupted(self.forget)
        self.storage.is_update_broken = False

    def forget(self) -> None:
        self.clear()
        window_loss = self.storage.window_loss
        window_loss.write(window_loss.after_discard())
        state = self.storage.pull()
        self.storage.push(kit.discard(state), state)
        self.storage.push_event()


def twice_if_interrupted(action: Callable[[], None]) -> None:
    """Run `action`, and once more if it raises, so that an interrupt leaves nothing
    half done; then raise.
    """
    try:
        action()
    except BaseException:
        action()
        raise


def require_room(state: State, size: Schedule) -> None:
    """Raise unless the window takes one more micro-batch: one whose update raised is
    full.
    """
    if state.micro_step == 0 or not kit.ends(state, size, kit.select):
        return
    full = f"of {size} that holds {state.micro_step}"
    if isinstance(size, UntilWeight):
        full = f"of weight {size.weight} that holds {state.weight:.10g}"
    raise explain(
        UsageError,
        "gradients",
        expected="flush() or discard() first, because the window's update raised",
        found=f"a micro-batch more for a window {full}",
        fix="Write optimizer.flush() to make the update that is due.",
    )
