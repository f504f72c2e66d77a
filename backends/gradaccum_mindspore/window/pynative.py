"""The open window in PyNative mode, where functions of `gradaccum.kit` compute the
state as Python numbers.

In PyNative mode, running an operator takes longer than reading a scalar, so wherever
possible the code reads scalars and skips operators with a Python ``if``.
"""

from __future__ import annotations

import math

import mindspore as ms
from mindspore import Tensor

from gradaccum import UsageError, kit
from gradaccum.kit import Decision, Options, Schedule, State
from gradaccum_mindspore import gradient_sum
from gradaccum_mindspore.extensions import Losses
from gradaccum_mindspore.gradient_sum import Gradients
from gradaccum_mindspore.state import Storage, window_size
from gradaccum_mindspore.update import Update

FLOAT16_MAX = 65504.0


class PyNativeWindow:
    """A window whose state is read from a `Storage` as Python numbers. `CompiledWindow`
    has the same methods for compiled code.

    If a call raises an error before it has written anything, the window stays
    unchanged. If a call raises an error after its first write, the window is marked as
    invalid.
    """

    def __init__(self, storage: Storage, options: Options, update: Update) -> None:
        self.storage = storage
        self.options = options
        self.update = update
        self.measures = kit.measures(options)

    def size(self) -> Schedule:
        """Return the number of micro-batches, or the weight, at which the open window
        ends. None means that the window ends only when the user closes it.
        """
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
        """Add the checked gradients of one micro-batch. If `loss` is not None, add the
        loss too. Store the new state, and return it.
        """
        state = self.storage.pull()
        if state.micro_step and kit.ends(state, size, kit.select):
            raise UsageError(
                "gradients: expected a call to flush() or discard() first, because the"
                " open window is full and its update raised an error; got another"
                " micro-batch. Call optimizer.flush() to retry the update, or"
                " optimizer.discard() to drop the window."
            )
        factor = kit.contribution(weight, self.options)
        is_finite = self.is_finite(gradients, weight, factor)
        is_added = bool(kit.usable(state, weight, is_finite))
        after = kit.accumulate(state, weight, is_finite, kit.select)
        with self.storage.writing():
            if is_added:
                for total, gradient in zip(self.storage.sums, gradients, strict=True):
                    if gradient is not None:
                        part = gradient_sum.scaled(gradient, factor, total.dtype)
                        gradient_sum.add_into(total, part)
            after = self.storage.push(after, state)
            if not is_finite:
                self.storage.push_event(overflow=True, micro_step=after.micro_step)
            if loss is not None:
                self.storage.window_loss.add(loss, weight, is_added)
        return after

    def is_finite(self, gradients: Gradients, weight: float, factor: float) -> bool:
        """False if the micro-batch must be dropped, because its gradients are not
        finite.
        """
        if self.options.on_overflow != "drop_micro_batch" or weight == 0:
            return True
        return all(
            gradient is None
            or gradient_sum.all_finite(
                gradient_sum.scaled(gradient, factor, total.dtype)
            )
            for total, gradient in zip(self.storage.sums, gradients, strict=True)
        )

    def close(self, state: State, denominator: float | None = None) -> None:
        """Close the window: update the parameters with its gradients, or skip the
        update. If `denominator` is not None, the gradient sum is divided by
        `denominator` instead of the window's weight.
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
        gradients: tuple[Tensor, ...] = ()
        if decision.apply:
            self.update.require_effect()
            gradients = gradient_sum.divided(
                self.storage.sums,
                decision.divisor,
                self.storage.gradient_dtypes,
                self.storage.float_dtype,
            )
            gradients = ms.mutable(gradients)
        with self.storage.writing():
            if decision.apply:
                self.update(gradients)
            self.finish(state, decision, losses)
        for extension in self.storage.extensions:
            extension.window_closed(state)

    def decision(self, ending: State, options: Options) -> Decision:
        largest = self.storage.largest_number
        norm = math.nan
        is_finite = True
        if self.measures:
            norm = gradient_sum.norm_of(self.storage.sums, self.storage.float_dtype)
            is_finite = norm <= largest and self.fits(ending, options, norm)
        return Decision(
            *kit.decide(ending, norm, is_finite, options, kit.select, largest)
        )

    def fits(self, ending: State, options: Options, norm: float) -> bool:
        """True if the window's unclipped gradients are finite after being cast to the
        inner optimizer's dtypes. `norm` is the 2-norm of the gradient sums.
        """
        divisor = kit.divisor(ending, options, kit.select)
        # No element is larger than the norm. So if the norm is small enough, the
        # elements need not be checked one by one.
        if norm <= FLOAT16_MAX * divisor:
            return True
        operand = Tensor(divisor, self.storage.float_dtype)
        return all(
            gradient_sum.fits(
                self.storage.sums[place], operand, self.storage.gradient_dtypes[place]
            ).item()
            for place in self.storage.narrow_places
        )

    def finish(self, state: State, decision: Decision, losses: Losses) -> None:
        """Clear the gradient sums. Write the window's loss, the window's outcome, and
        the state with which the next window begins.
        """
        gradient_sum.clear(self.storage.sums)
        self.storage.window_loss.write(losses)
        after = kit.close(
            state, decision.apply, decision.overflow, self.options, kit.select
        )
        self.storage.push(after, state)
        self.storage.push_event(
            decision.apply, not decision.apply, decision.overflow, decision.grad_norm
        )

    def flush(self, denominator: float | None) -> bool:
        """Close the open window; return whether a window was open."""
        state = self.storage.pull()
        is_open = state.micro_step > 0
        if is_open:
            self.close(state, denominator)
        else:
            self.storage.push_event()
        return bool(is_open)

    def discard(self) -> None:
        storage = self.storage
        with storage.writing():
            gradient_sum.clear(storage.sums)
            storage.window_loss.write(storage.window_loss.after_discard())
            state = storage.read()
            # If the window is marked as invalid, its `micro_step` is not a number of
            # micro-batches.
            storage.push(kit.discard(state._replace(micro_step=0)), state)
            storage.push_event()
