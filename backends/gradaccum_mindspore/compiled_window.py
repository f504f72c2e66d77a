"""The events of a window where the state is a tensor: inside `mindspore.jit` and in graph mode.

The compiler drops what it believes to be without effect. Hence the shape of this code: every new value is computed from what was
read before the first write; nothing is read again after it was written, but at the end of a window, which begins with reading;
a branch returns no value that was computed in it. A function must return something: its None would be computed by the Python interpreter.

The end of a window has two branches, for the update and for a norm whose squares overflow: each costs about as much as ten scalar
operators. Each is a method of its own, because the compiler copies what follows an ``if`` in the same function into both branches.
What one part tells the next goes through `Notes`.
"""

from __future__ import annotations

from typing import Any

from mindspore import Tensor, ops

from gradaccum.kit import Options, accumulate, contribution, decide, divisor, usable
from gradaccum_mindspore.checks import (
    check_compiled_gradients,
    check_compiled_structure,
    check_compiled_weight,
    check_compiled_weight_shape,
    compiled_names_of,
)
from gradaccum_mindspore.compiled_state import CompiledState, where
from gradaccum_mindspore.state import Storage
from gradaccum_mindspore.sums import (
    compiled_add,
    compiled_finite,
    compiled_fits,
    divide,
    each,
    robust_measure,
    sum_of_squares,
)


def chosen(condition: Any, a: Any, b: Any) -> Any:
    """`where` for a condition that always holds, as it does for a finite gradient of weight 1."""
    return a


def number_of(weight: Any) -> Any:
    """A weight as a number or a scalar Tensor; raises while compiling if it is none."""
    if isinstance(weight, Tensor):
        check_compiled_weight_shape(weight.shape)
        return weight.reshape(())
    check_compiled_weight(weight)
    return weight


def shape_of(gradient: Any) -> Any:
    """A constant of the compiler's."""
    return () if gradient is None else gradient.shape


def dtype_of(gradient: Any) -> Any:
    """Likewise."""
    return None if gradient is None else gradient.dtype


class CompiledWindow(CompiledState):
    """Micro-batches and what is decided at a window's end, for the compiler to follow."""

    def __init__(self, storage: Storage, options: Options) -> None:
        super().__init__(storage, options)
        self.names_of = compiled_names_of(storage.specs, storage.names)

    def add(self, gradients: Any, weight: Any) -> Any:
        """Take in one micro-batch; returns the state after it, not yet written, and the event if its gradient may be dropped, else None."""
        state = self.read()
        if weight is None and self.options.on_overflow == "skip_window":
            compiled_add(self.storage.sums, gradients, None, None)
            return accumulate(state, self.one, self.true, chosen), None
        amount = self.one if weight is None else self.one * number_of(weight)
        factor = contribution(amount, self.options)
        finite = self.true
        if self.options.on_overflow == "drop_micro_batch":
            finite = compiled_finite(self.storage.sums, gradients, factor) | (amount == 0)
        after = accumulate(state, amount, finite, where)
        never, dropped = state[0] < 0, (finite == False).astype(self.float_dtype)  # noqa: E712
        event = self.event(never, never, dropped * (after[0] + 1), self.norm())
        compiled_add(self.storage.sums, gradients, None if weight is None else factor, usable(state, amount, finite))
        return after, event

    def decide(self) -> Any:
        """Measure the window and note what is to be done with it."""
        notes = self.notes
        notes.write_state(self.storage.weight, self.storage.overflow, self.storage.loss_scale)
        if self.calls_steps:
            notes.write_terms(self.storage.terms)
        squares = sum_of_squares(self.storage.sums, self.float_dtype)
        notes.write_measure(ops.sqrt(squares), ops.isfinite(squares))
        self.measure_again()
        apply, overflow, divisor, grad_norm = self.judged(notes.state(), notes.norm.value(), notes.finite & self.true)
        return notes.write_decision(apply, overflow, divisor, grad_norm)

    def measure_again(self) -> Any:
        """Note norm and finiteness the robust way where the squares overflow."""
        if self.notes.unmeasured:
            norm, finite = robust_measure(self.storage.sums, self.float_dtype)
            self.notes.write_measure(norm, finite)
        return True

    def judged(self, state: Any, norm: Any, finite: Any) -> Any:
        """`gradaccum.kit.decide`, to which a gradient beyond the inner optimizer's dtypes is not finite, nor is a window of no size."""
        if self.calls_steps:
            finite = finite & (self.notes.terms.value()[3] >= 1)
        if self.storage.narrowed:
            divides = divisor(state, self.options, where)
            finite = finite & compiled_fits(self.storage.sums, self.handed_over(divides), self.storage.handed)
        return decide(state, norm, finite, self.options, where, self.storage.largest)

    def gradients(self, divisor: Any) -> Any:
        """What the inner optimizer is given."""
        return divide(self.storage.sums, self.handed_over(divisor), self.storage.handed)

    def handed_over(self, divisor: Any) -> Any:
        """`divisor` without what the inner optimizer divides by itself."""
        if self.storage.inner_scale == 1:
            return divisor
        return divisor / self.inner_scale

    def ordered(self, gradients: Any) -> Any:
        """The gradients in the parameters' order; raises `GradientError` while compiling."""
        specs = self.storage.specs
        if isinstance(gradients, dict):
            gradients = self.by_name(gradients)
        gradients = tuple(gradients)
        check_compiled_structure(len(gradients), specs)
        check_compiled_gradients(each(shape_of, gradients), each(dtype_of, gradients), specs)
        return gradients

    def by_name(self, gradients: Any) -> Any:
        """A dict's values in the parameters' order."""
        ordered: Any = ()
        for name in self.names_of(tuple(gradients.keys())):
            ordered = (*ordered, gradients[name])
        return ordered
