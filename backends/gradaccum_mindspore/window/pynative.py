"""The open window in PyNative, where the core's transitions move the state as Python
numbers.

There an operator costs more than reading a scalar, so a Python ``if`` leaves out every
operator that it can.
"""

from __future__ import annotations

import math

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

    def require_whole(self) -> None:
        """Raise unless the last update ended in the inner optimizer, or something was
        loaded since.
        """
        if self.storage.half_made:
            raise kit.half_made_error()

    def add(
        self,
        gradients: Gradients,
        weight: float,
        size: Schedule,
        loss: float | None = None,
    ) -> State:
        """Take in one micro-batch of checked gradients, and its `loss` if one is
        passed; return the state after it, written.

        If this raises, the state is the old one; if only some sums hold the gradient,
        the window is spoilt, and its end skips it.
        """
        state = self.storage.pull()
        require_room(state, size)
        factor = kit.contribution(weight, self.options)
        finite = (
            weight == 0
            or self.options.on_overflow != "drop_micro_batch"
            or self.finite(gradients, factor)
        )
        adds = bool(kit.usable(state, weight, finite))
        added = gradients if adds else (None,) * len(gradients)
        knowledge, begun = self.storage.knowledge, False
        losses = None if loss is None else knowledge.pull()
        try:
            for total, part in gradient_sum.parts(self.storage.sums, added, factor):
                begun = True
                gradient_sum.add_into(total, part)
            begun = True
            after = self.storage.push(
                kit.accumulate(state, weight, finite, kit.select), state
            )
            if not finite:
                self.storage.push_event(False, False, True, micro_step=after.micro_step)
            if loss is not None:
                knowledge.add_loss(loss, weight, adds)
        except BaseException:
            if begun:
                self.take_back(state, losses)
            raise
        return after

    def take_back(self, state: State, losses: Losses | None) -> None:
        """Put back the state and the losses before a micro-batch of which some sums may
        hold a part.
        """
        if losses is not None:
            self.storage.knowledge.push(losses)
        (gradient_sum.spoil if state.micro_step else gradient_sum.clear)(
            self.storage.sums
        )
        self.storage.push(state, self.storage.pull())

    def finite(self, gradients: Gradients, factor: float) -> bool:
        parts = zip(self.storage.sums, gradients, strict=True)
        return all(
            g is None
            or gradient_sum.all_finite(gradient_sum.scaled(g, factor, s.dtype))
            for s, g in parts
        )

    def size(self) -> Schedule:
        """Return the open window's size, or its weight; None: the caller closes it."""
        if not self.storage.varies:
            return self.options.steps
        size = window_size(self.options.steps, self.storage.optimizer_step.item())
        self.storage.push_size(kit.code_of(size))
        return size

    def close(
        self, state: State, update: Update, denominator: float | None = None
    ) -> None:
        """End the window: make the `update` with its gradients, divided by
        `denominator` if one is given, or not at all.

        If this raises before the inner optimizer is called, the window is open as
        before, and ``flush`` makes its update. If the inner optimizer raises, each
        further call raises until ``discard``, or until a checkpoint is loaded.
        """
        ending, options = state, self.options
        if denominator is not None:
            fields, options = kit.with_denominator(
                state, denominator, options, kit.select
            )
            ending = kit.at_rest(
                State(*fields), float64_weight=self.storage.float_dtype == ms.float64
            )
        decision = self.decision(ending, options)
        self.carry_out(
            state,
            decision,
            self.storage.knowledge.after(state, ending, options),
            update,
        )
        self.storage.listening.window_ended(state)

    def decision(self, ending: State, options: Options) -> Decision:
        norm, finite = (
            self.measure(ending, options) if kit.measures(options) else (math.nan, True)
        )
        return Decision(
            *kit.decide(ending, norm, finite, options, kit.select, self.storage.largest)
        )

    def carry_out(
        self, state: State, decision: Decision, losses: Losses, update: Update
    ) -> None:
        """Make the update, if that was decided, and end the window."""
        if decision.apply:
            update.require_in_place()
            gradients = ms.mutable(self.gradients(decision.divisor))
            self.storage.half_made = True
            update(gradients)
            self.storage.half_made = False
        try:
            self.finish(state, decision, losses)
        except BaseException:
            self.finish(state, decision, losses)
            raise

    def measure(self, ending: State, options: Options) -> tuple[float, bool]:
        norm, finite = gradient_sum.measure(self.storage.sums, self.storage.float_dtype)
        return norm, finite and self.fits(ending, options, norm)

    def fits(self, ending: State, options: Options, norm: float) -> bool:
        """True if the divided sums, not yet clipped, are finite in the inner
        optimizer's dtypes; `norm` is the sums'.
        """
        divides = kit.divisor(ending, options, kit.select) / self.storage.inner_scale
        # No element exceeds the norm, so the elements themselves are seldom looked at.
        if norm <= FLOAT16_MAX * divides:
            return True
        pairs, operand = (
            tuple(zip(self.storage.sums, self.storage.handed, strict=True)),
            Tensor(divides, self.storage.float_dtype),
        )
        return all(
            gradient_sum.fits(pairs[i][0], operand, pairs[i][1]).asnumpy().item()
            for i in self.storage.narrowed
        )

    def finish(self, state: State, decision: Decision, losses: Losses) -> None:
        """Clear the sums and write what follows; a second call does the same."""
        self.clear()
        self.storage.knowledge.push(losses)
        self.storage.push(
            kit.close(
                state, decision.apply, decision.overflow, self.options, kit.select
            ),
            state,
        )
        self.storage.push_event(
            decision.apply, not decision.apply, decision.overflow, decision.grad_norm
        )

    def flush(self, update: Update, denominator: float | None = None) -> bool:
        """Close the open window; returns whether there was one."""
        state = self.storage.pull()
        if state.micro_step > 0:
            self.close(state, update, denominator)
        else:
            self.storage.push_event(False, False, False)
        return bool(state.micro_step > 0)

    def discard(self) -> None:
        """Forget the open window, even if interrupted."""
        try:
            self.forget()
        except BaseException:
            self.forget()
            raise
        self.storage.half_made = False

    def forget(self) -> None:
        self.clear()
        self.storage.knowledge.push(self.storage.knowledge.forgotten())
        state = self.storage.pull()
        self.storage.push(kit.discard(state), state)
        self.storage.push_event(False, False, False)

    def clear(self) -> None:
        gradient_sum.clear(self.storage.sums)

    def gradients(self, divides: float) -> tuple[Tensor, ...]:
        return gradient_sum.divided(
            self.storage.sums,
            divides / self.storage.inner_scale,
            self.storage.handed,
            self.storage.float_dtype,
        )


def require_room(state: State, size: Schedule) -> None:
    if state.micro_step > 0 and kit.ends(state, size, kit.select):
        full = f"of {size} that holds {state.micro_step}"
        if isinstance(size, UntilWeight):
            full = f"of weight {size.weight} that holds {state.weight:.10g}"
        expected, found = (
            "flush() or discard() first, because the window's update raised",
            f"a micro-batch more for a window {full}",
        )
        fix = "Write optimizer.flush() to make the update that is due."
        raise explain(UsageError, "gradients", expected=expected, found=found, fix=fix)
