"""The events of a window where the state is a Tensor: inside `mindspore.jit` and in graph mode.

The compiler drops operations that it believes to have no effect. So this code computes every new value from values that it read before its
first write; it reads nothing again after it was written, except at the end of a window, which begins with reading; no branch returns a
value that was computed in it. Each function returns something: the Python interpreter would compute a None.

The end of a window has two branches: one for the update, one for a norm whose squares overflow. Each costs about as much as ten scalar
operators. Each is a method of its own, because the compiler copies the rest of a function after an ``if`` into both branches.
`Notes` carries values from one part to another.

The compiler takes a global function for the method of its name, if that method calls it. So `close` and `discard` of the core have other
names here.
"""

from __future__ import annotations

import mindspore as ms
from mindspore import Tensor, ops

from gradaccum.kit import Fields, Options, accumulate, contribution, decide, divisor, usable
from gradaccum.kit import close as state_closed
from gradaccum.kit import discard as state_discarded
from gradaccum_mindspore.compiled_arguments import CompiledArguments
from gradaccum_mindspore.compiled_state import MICRO_STEP, OPTIMIZER_STEP, WEIGHT
from gradaccum_mindspore.norm import compiled_measure, robust_measure
from gradaccum_mindspore.packed import Packed
from gradaccum_mindspore.plain_ends import compiled_ends_plainly, compiled_weigh
from gradaccum_mindspore.state import STEPS, Storage
from gradaccum_mindspore.sums import compiled_add, compiled_clear, compiled_finite, compiled_fits, divide, where
from gradaccum_mindspore.types import Gradients, Loss, Weight
from gradaccum_mindspore.update import Update
from gradaccum_mindspore.workers.group import WorkerGroup


def chosen(condition: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """`where` for a condition that always holds, as it does for a finite gradient of weight 1."""
    return a


class CompiledWindow(CompiledArguments):
    """One window as Tensors, for the compiler to follow; `PyNativeWindow` has the same methods."""

    def __init__(self, storage: Storage, options: Options, workers: WorkerGroup | None = None) -> None:
        super().__init__(storage, options)
        self.workers = workers
        self.packed = Packed(storage.sums, storage.float_dtype)

    def add(self, gradients: Gradients, weight: Weight, loss: Loss) -> tuple[Fields, Tensor | None, Tensor | None]:
        """Add one micro-batch of ordered gradients to the sums.

        Returns the state after it; the event, if a gradient may be dropped; the value of `Knowledge.loss`, if its loss is told.

        The caller asks `is_full` of the state, and `needs_first`, and then calls `write_added`, and `see_first` if `measures_noise`. The
        compiler drops an ``if`` on a flag that comes out of a function that writes, so these are calls of their own.
        """
        before, known, told = self.read(), self.storage.knowledge, None
        if self.adds_certainly(weight):
            amount = self.amount(weight)
            if loss is not None:
                told = known.compiled_certain(self.loss_number(loss), amount)
            factor = None if weight is None or self.options.reduction != "mean" else amount
            compiled_add(self.storage.sums, gradients, factor, None)
            return accumulate(before, self.one if weight is None else amount, self.true, chosen), None, told
        if weight is not None and self.may_be_plain:
            compiled_weigh(self.storage.key)
        amount = self.one if weight is None else self.amount(weight)
        factor = contribution(amount, self.options)
        finite = self.true
        if self.options.on_overflow == "drop_micro_batch":
            finite = compiled_finite(self.storage.sums, gradients, factor) | (amount == 0)
        state = accumulate(before, amount, finite, where)
        never, dropped = state[MICRO_STEP] < 0, (finite == False).astype(self.float_dtype)  # noqa: E712
        event = self.event(never, never, dropped * (state[MICRO_STEP] + 1), self.grad_norm())
        adds = usable(before, amount, finite)
        if loss is not None:
            told = known.compiled_told(self.loss_number(loss), amount, adds)
        compiled_add(self.storage.sums, gradients, None if weight is None else factor, adds)
        return state, event, told

    def write_added(self, state: Fields, event: Tensor | None, told: Tensor | None, weight: Weight) -> bool:
        """Assign what `add` returned for a micro-batch of this weight."""
        if event is None:
            # The same numbers as the state's. One operator each, where adding and assigning are two.
            ops.assign_add(self.storage.micro_step, self.one_step)
            ops.assign_add(self.storage.weight, self.one if weight is None else self.amount(weight))
            if told is not None:
                ops.assign_add(self.storage.knowledge.loss, told)
            return self.write_size(state)
        self.write_open(state, event)
        if told is not None:
            ops.assign(self.storage.knowledge.loss, told)
        return self.write_size(state)

    def needs_first(self, state: Fields) -> Tensor:
        """Whether the noise scale needs the norm of the sum after this micro-batch."""
        return self.storage.knowledge.compiled_needs_first(state) if self.measures_noise else self.true

    def see_first(self, needed: Tensor) -> bool:
        """Measure the sum for the noise scale if `needed`; a branch of its own."""
        if needed:
            self.storage.knowledge.compiled_see_first(self.packed(), self.storage.weight, self.storage.loss_scale)
        return True

    def close(self, update: Update, untold: bool) -> bool:
        """End the window: make the `update` with its gradients, or not at all.

        `untold`: certainly some micro-batch of the window did not tell its loss.
        """
        if self.workers is not None:
            self.workers.compiled_join()
        return self.close_joined(update, untold)

    def close_joined(self, update: Update, untold: bool) -> bool:
        """The same once its workers are added up."""
        self.note_decision()
        self.apply(update)
        return self.finish(untold)

    def ends_plainly(self) -> bool:
        """Whether the end that is being compiled, of a micro-batch without a weight, needs no decision; a constant."""
        if self.may_be_plain and self.workers is None:
            plainly: bool = compiled_ends_plainly(self.storage.key)
            return plainly
        return False

    def close_plainly(self, update: Update, told: bool) -> bool:
        """End a window that needs no measure and no decision: its weight is above 0, and its divisor in range.

        Here is no branch, and nearly every value that is written is a constant. `told`: the last micro-batch told its loss.
        """
        state = self.read()
        update(self.gradients(divisor(state, self.options, where)))
        loss, noise = self.unknown, None
        if told:
            loss, noise = self.storage.knowledge.compiled_after(state, self.nan)
        after = state_closed(state, self.true, self.false, self.options, where)
        compiled_clear(self.storage.sums, after[WEIGHT])
        self.storage.knowledge.compiled_write(loss, noise)
        ops.assign(self.storage.micro_step, self.no_step)
        ops.assign(self.storage.weight, self.zero)
        ops.assign(self.storage.optimizer_step, after[OPTIMIZER_STEP].astype(ms.int32))
        self.write_event(self.plain_event)
        return True

    def note_decision(self) -> bool:
        """Measure the window, decide about it, and note the decision."""
        notes = self.notes
        notes.write_state(self.storage.weight, self.storage.overflow, self.storage.loss_scale)
        if self.calls_steps and self.workers is None:
            notes.write_terms(self.storage.terms)
        if not self.measures:
            state, sound = self.sized(notes.state())
            return notes.write_decision(*decide(state, self.nan, sound, self.options, where, self.storage.largest))
        norm, right = compiled_measure(self.packed(), self.float_dtype)
        notes.write_measure(norm, right)
        self.measure_again()
        state, sound = self.sized(notes.state())
        norm = notes.norm.value()
        finite = self.fits(state, ops.isfinite(norm))
        if self.calls_steps:
            finite = finite & sound
        apply, overflow, divides, grad_norm = decide(state, norm, finite, self.options, where, self.storage.largest)
        return notes.write_decision(apply, overflow, divides, grad_norm)

    def measure_again(self) -> bool:
        """Note the norm in the robust way if the squares overflow or vanish: inf if it is not finite."""
        # A condition is a Parameter as it is: `not` would be an operator more in each window.
        if self.notes.measured:
            pass
        else:
            norm, finite = robust_measure(self.packed(), self.float_dtype)
            ops.assign(self.notes.norm, where(finite, norm, self.infinity))
        return True

    def sized(self, state: Fields) -> tuple[Fields, Tensor]:
        """`state`, and whether the user's function gave the window a size of at least 1; else it has no weight and an overflow."""
        if self.calls_steps and self.workers is None:
            micro_step, optimizer_step, skipped, weight, overflow, loss_scale, tracker = state
            sound = self.size_code[STEPS] * self.notes.terms.value()[STEPS] >= 1
            weight = where(sound, weight, ops.zeros_like(weight))
            overflow = overflow | (sound == False)  # noqa: E712
            return (micro_step, optimizer_step, skipped, weight, overflow, loss_scale, tracker), sound
        return state, self.true

    def fits(self, state: Fields, finite: Tensor) -> Tensor:
        """`finite`, and the divided sums are finite in the inner optimizer's dtypes."""
        if self.storage.narrowed:
            divides = divisor(state, self.options, where)
            finite = finite & compiled_fits(self.storage.sums, self.handed_over(divides), self.storage.handed)
        return finite

    def apply(self, update: Update) -> bool:
        """Make the update, if that was decided."""
        if self.notes.apply:
            update(self.gradients(self.notes.divisor.value()))
        return True

    def finish(self, untold: bool) -> bool:
        """Clear the sums, assign the state after the window and its last event; `untold` as for `close`."""
        notes = self.notes
        apply, overflow = notes.applied & self.true, notes.overflow & self.true
        before, grad_norm = self.read(), notes.grad_norm.value()
        loss, noise = self.storage.knowledge.compiled_after(before, grad_norm)
        if untold and self.workers is None:
            loss = self.unknown
        after = state_closed(before, apply, overflow, self.options, where)
        compiled_clear(self.storage.sums, after[WEIGHT])
        if self.workers is not None:
            self.workers.window_ended()
        self.storage.knowledge.compiled_write(loss, noise)
        self.write_empty(self.event(apply, apply == False, overflow, grad_norm))  # noqa: E712
        return self.write_counters(after)

    def flush(self, update: Update) -> Tensor:
        """Close the open window; returns whether there was one, a bool Tensor of shape ()."""
        is_open = self.storage.micro_step.value() > 0
        if is_open:
            self.close(update, False)
        return is_open

    def discard(self) -> bool:
        """Forget the open window."""
        state = state_discarded(self.read())
        never = state[MICRO_STEP] < 0
        event = self.event(never, never, never, self.grad_norm())
        loss, noise = self.storage.knowledge.compiled_forgotten()
        self.storage.knowledge.compiled_write(loss, noise)
        compiled_clear(self.storage.sums, state[WEIGHT])
        if self.workers is not None:
            self.workers.window_ended()
        return self.write_open(state, event)

    def gradients(self, divides: Tensor) -> tuple[Tensor, ...]:
        """The sums divided by `divides`, as the inner optimizer gets them."""
        return divide(self.storage.sums, self.handed_over(divides), self.storage.handed)

    def handed_over(self, divides: Tensor) -> Tensor:
        """`divides` without the scale that the inner optimizer divides by itself."""
        if self.storage.inner_scale == 1:
            return divides
        return divides / self.inner_scale
