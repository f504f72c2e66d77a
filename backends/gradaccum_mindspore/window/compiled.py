"""The open window inside `mindspore.jit` and in graph mode, where the state is a
Tensor.

The compiler drops operations that it believes to have no effect. So this code computes
every new value from values that it read before its first write, and reads nothing that
it wrote, except at the end of a window, which begins with reading; no branch returns a
value that was computed in it. Each function returns something: the Python interpreter
would compute a None.

The end of a window has two branches: the update, and a norm whose squares overflow.
Each is a method of its own, because the compiler copies the rest of a function after an
``if`` into both branches.

The compiler takes a global function for the method of its name, if that method calls
it: so ``kit.close`` and ``kit.discard``. Structure, shapes, dtypes and Python numbers
of arguments are constants of the program, so a wrong one raises while MindSpore
compiles.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any, Protocol

import mindspore as ms
from mindspore import Parameter, Tensor, nn, ops
from mindspore.ops import constexpr

from gradaccum import kit
from gradaccum.kit import Fields, Options
from gradaccum_mindspore import checks, gradient_sum
from gradaccum_mindspore.checks import Loss, NamedGradients, Weight
from gradaccum_mindspore.extensions import NO_LOSS
from gradaccum_mindspore.gradient_sum import (
    DType,
    Gradients,
    Number,
    Packed,
    Shape,
    each,
    where,
)
from gradaccum_mindspore.state import (
    GRAD_NORM,
    STEPS,
    Storage,
    check_constant_size,
    check_size_dtype,
    sizes_of,
)
from gradaccum_mindspore.update import Update

NUMBERS = count()
"""Tells the notes of one program apart: compiled code takes no two Parameters of one
name.
"""


class Notes(nn.Cell):  # type: ignore[misc]
    """The measure and the decision of the window that ends: Parameters that hold a
    value for the time of one call.

    MindSpore's runtime copies a value that one branch computes and another uses, and
    with an even ``steps`` never frees the copy: 12 KiB of host memory per window. So
    inside the end of a window no computed value crosses into an inner branch or past
    it, and each condition there is a bool Parameter. No checkpoint has notes.
    """

    weight: Parameter
    before: Parameter
    """bool: `State.overflow` before the decision."""
    loss_scale: Parameter
    terms: Parameter
    norm: Parameter
    """inf or NaN if the sums are not finite."""
    measured: Parameter
    """bool: `norm` is right already."""
    overflow: Parameter
    divisor: Parameter
    grad_norm: Parameter
    applied: Parameter
    apply: Parameter
    """bool: `applied`, as a condition."""

    def __init__(self, float_dtype: DType) -> None:
        super().__init__(auto_prefix=False)
        self.float_dtype = float_dtype
        number = next(NUMBERS)
        self.add("loss_scale", Tensor(1.0, ms.float32), number)
        self.add(
            "terms",
            Tensor(
                kit.encode_terms(kit.Terms("mean", "skip_window", "unused", 1)),
                ms.int32,
            ),
            number,
        )
        for field in ("weight", "norm", "divisor", "grad_norm"):
            self.add(field, Tensor(0.0, float_dtype), number)
        for field in ("before", "measured", "overflow", "applied", "apply"):
            self.add(field, Tensor(False), number)

    def add(self, field: str, value: Tensor, number: int) -> None:
        object.__setattr__(
            self,
            field,
            Parameter(
                value, name=f"gradaccum.note{number}.{field}", requires_grad=False
            ),
        )

    def write_state(
        self, weight: Parameter, overflow: Parameter, loss_scale: Parameter
    ) -> bool:
        """Note the fields that the decision reads. The state itself is written after
        the decision.
        """
        ops.assign(self.weight, weight)
        ops.assign(self.before, overflow)
        ops.assign(self.loss_scale, loss_scale)
        return True

    def write_terms(self, terms: Parameter) -> Tensor:
        return ops.assign(self.terms, terms)

    def state(self) -> Fields:
        """Return the noted fields as a state; no decision reads the other fields, which
        are zero.
        """
        weight, zero = self.weight.value(), 0 * self.weight.value()
        return (
            zero,
            zero,
            zero,
            weight,
            self.before & True,
            self.loss_scale.value(),
            zero,
        )

    def write_measure(self, norm: Tensor, right: Tensor) -> bool:
        ops.assign(self.norm, norm.astype(self.float_dtype))
        ops.assign(self.measured, right)
        return True

    def write_decision(
        self, apply: Tensor, overflow: Tensor, divisor: Tensor, grad_norm: Tensor
    ) -> bool:
        ops.assign(self.divisor, divisor.astype(self.float_dtype))
        ops.assign(self.grad_norm, grad_norm.astype(self.float_dtype))
        ops.assign(self.overflow, overflow)
        ops.assign(self.applied, apply)
        ops.assign(self.apply, apply)
        return True


(
    MICRO_STEP,
    OPTIMIZER_STEP,
    SKIPPED_WINDOWS,
    WEIGHT,
    OVERFLOW,
    LOSS_SCALE,
    GROWTH_TRACKER,
) = range(7)
"""The places of the state's fields: MindSpore warns of a field that code unpacks and
does not use.
"""
SMALLEST_WEIGHT, LARGEST_WEIGHT = 2.0**-40, 2.0**40
"""Between these a weight, and the sum of a window's weights, are above 0 and finite in
float32.
"""


def exact_in(dtype: DType, options: Options) -> Options:
    """Return `options` with float64 limits as Tensors: MindSpore rounds a Python number
    to float32.
    """
    if dtype != ms.float64:
        return options
    limits = {name: getattr(options, name) for name in ("clip_norm", "skip_norm")}
    return options._replace(
        **{
            name: Tensor(limit, dtype)
            for name, limit in limits.items()
            if limit is not None
        }
    )


def number_of(weight: Number) -> Number:
    """Return a weight as a number or a scalar Tensor; raises while compiling if it is
    neither.
    """
    if isinstance(weight, Tensor):
        checks.check_compiled_shape("weight", weight.shape)
        return weight.reshape(())
    checks.check_compiled_weight(weight)
    return weight


def shape_of(gradient: Tensor | None) -> Shape:
    return () if gradient is None else gradient.shape


def dtype_of(gradient: Tensor | None) -> DType | None:
    return None if gradient is None else gradient.dtype


@constexpr  # type: ignore[untyped-decorator]
def is_constant(number: float | None) -> bool:
    """True if a number is a constant of the program; otherwise it comes as None."""
    return number is not None


@constexpr  # type: ignore[untyped-decorator]
def is_certain(weight: float | None) -> bool:
    """True if a weight is a constant, not None, that leaves nothing to be decided about
    its micro-batch.
    """
    return weight is not None and bool(SMALLEST_WEIGHT <= weight <= LARGEST_WEIGHT)


@constexpr  # type: ignore[untyped-decorator]
def float64_of(number: float) -> Tensor:
    """Return a constant as a Tensor: MindSpore rounds a Python number to float32."""
    return Tensor(number, ms.float64)


def note_weighed_in(storage: Storage) -> Callable[[bool], bool]:
    """Return a function that notes, while MindSpore compiles, whether a micro-batch has
    a weight. A program is compiled anew for a micro-batch of another size.
    """

    @constexpr(reuse_result=False)  # type: ignore[untyped-decorator]
    def note_weighed(weighed: bool) -> bool:
        storage.sizes.weighed = weighed
        return weighed

    while_compiling: Callable[[bool], bool] = note_weighed
    return while_compiling


class Workers(Protocol):
    """All workers that share a window, as the window of one of them sees them."""

    def compiled_join(self) -> bool:
        """Add up the window of all workers."""

    def window_ended(self) -> Tensor:
        """Begin the next window, with this worker's own sum."""

    def require_same_rates(self) -> None:
        """Raise unless no window was skipped because learning rates differ."""

    def require_own_sum(self, call: str) -> None:
        """Raise unless the open window's sum is this worker's own."""

    def compiled_norm_of_all(self, whole: Tensor, own: Tensor) -> Tensor:
        """Return the norm over all workers; `own` is of this worker's sharded sums."""


def chosen(condition: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return a


class CompiledWindow(nn.Cell):  # type: ignore[misc]
    """One window as Tensors, for the compiler to follow; `PyNativeWindow` has the same
    methods.
    """

    def __init__(
        self, storage: Storage, options: Options, workers: Workers | None = None
    ) -> None:
        super().__init__(auto_prefix=False)
        self.storage = storage
        self.steps: Any = options.steps
        self.sizes: Any = sizes_of(options.steps)
        self.calls_steps, self.by_weight = (
            callable(self.sizes),
            isinstance(options.steps, kit.UntilWeight),
        )
        self.use_of_weights = kit.use_of_weights(options)
        self.measures = kit.measures(options)
        # The compiler cannot follow a function or an object inside a named tuple.
        self.options = exact_in(
            storage.float_dtype, options._replace(steps=None, scaler=None)
        )
        self.float_dtype = storage.float_dtype
        self.scale_moves = (
            options.scale_rule._replace(init_scale=1.0) != kit.ScaleRule()
        )
        self.true = Tensor(True)
        self.one = Tensor(1.0, storage.float_dtype)
        self.false, self.no_step, self.one_step = (
            Tensor(False),
            Tensor(0, ms.int32),
            Tensor(1, ms.int32),
        )
        self.zero = Tensor(0.0, storage.float_dtype)
        self.unknown = Tensor(NO_LOSS, storage.float_dtype)
        self.nan, self.infinity = (
            Tensor(float(number), storage.float_dtype) for number in ("nan", "inf")
        )
        self.inner_scale = Tensor(storage.inner_scale, storage.float_dtype)
        self.varies = storage.varies
        self.size_code = Tensor([0] * STEPS + [-1 if self.by_weight else 1], ms.int32)
        self.other_codes = Tensor(
            [*kit.encode_terms(storage.terms_after(0))[:-1], 0], ms.int32
        )
        self.notes = Notes(storage.float_dtype)
        self.names_of = checks.compiled_names_of(storage.specs, storage.names)
        self.note_weighed = note_weighed_in(storage)
        self.workers = workers
        self.packed, self.packed_shards = (
            Packed(each, storage.float_dtype)
            for each in (storage.whole, storage.shards)
        )
        self.sharded = len(storage.sharded) > 0

    def read(self) -> Fields:
        """Return the state as plain Tensors, in the order of `gradaccum.kit.State`'s
        fields.
        """
        store = self.storage
        return (
            store.micro_step.value(),
            store.optimizer_step.value(),
            store.skipped_windows.value(),
            store.weight.value(),
            store.overflow & self.true,
            store.loss_scale.value(),
            store.growth_tracker.value(),
        )

    def size(self, optimizer_step: Tensor) -> Tensor:
        """Return the size of the window that follows this update, as the user's
        function returns it.
        """
        if self.calls_steps:
            given = self.sizes(optimizer_step)
            if isinstance(given, Tensor):
                check_size_dtype(given.dtype, self.by_weight)
                return given.reshape(())
            check_constant_size(given, self.by_weight)
            return 0 * optimizer_step + given
        return kit.steps_at(self.sizes, optimizer_step, where)

    def is_full(self, state: Fields) -> Tensor:
        if self.calls_steps:
            # Not `ends`: the compiler takes a Tensor for a function there.
            micro_step, optimizer_step, _, weight, _, _, _ = state
            held = weight if self.by_weight else micro_step
            return held >= self.size(optimizer_step)
        return kit.ends(state, self.steps, where)

    def grad_norm(self) -> Tensor:
        return self.storage.last_event.value()[GRAD_NORM]

    def event(
        self, applied: Tensor, skipped: Tensor, overflow: Tensor, grad_norm: Tensor
    ) -> Tensor:
        return ops.stack(
            [
                value.astype(self.float_dtype)
                for value in (applied, skipped, overflow, grad_norm)
            ]
        )

    def write_event(self, event: Tensor) -> Tensor:
        return ops.assign(self.storage.last_event, event)

    def write_open(self, state: Fields, event: Tensor | None) -> bool:
        """Assign what a micro-batch changes; without an `event` it changes neither that
        nor the overflow flag.
        """
        ops.assign(self.storage.micro_step, state[MICRO_STEP].astype(ms.int32))
        ops.assign(self.storage.weight, state[WEIGHT].astype(self.float_dtype))
        if event is not None:
            ops.assign(self.storage.overflow, state[OVERFLOW])
            self.write_event(event)
        return True

    def write_empty(self, event: Tensor) -> bool:
        """Assign what an empty window holds. The core's zeros would be operators."""
        ops.assign(self.storage.micro_step, self.no_step)
        ops.assign(self.storage.weight, self.zero)
        ops.assign(self.storage.overflow, self.false)
        self.write_event(event)
        return True

    def write_size(self, state: Fields) -> bool:
        if self.varies:
            ops.assign(
                self.storage.terms,
                self.other_codes
                + self.size_code * self.size(state[OPTIMIZER_STEP]).astype(ms.int32),
            )
        return True

    def write_counters(self, state: Fields) -> bool:
        ops.assign(self.storage.optimizer_step, state[OPTIMIZER_STEP].astype(ms.int32))
        ops.assign(
            self.storage.skipped_windows, state[SKIPPED_WINDOWS].astype(ms.int32)
        )
        if self.scale_moves:
            ops.assign(self.storage.loss_scale, state[LOSS_SCALE].astype(ms.float32))
            ops.assign(
                self.storage.growth_tracker, state[GROWTH_TRACKER].astype(ms.int32)
            )
        return True

    def ordered(self, gradients: Gradients | NamedGradients) -> Gradients:
        """Return the gradients in the parameters' order, checked while compiling."""
        specs = self.storage.specs
        if isinstance(gradients, dict):
            gradients = self.by_name(gradients)
        gradients = tuple(gradients)
        is_pair = len(gradients) == 2 and isinstance(gradients[1], (tuple, list, dict))
        checks.check_compiled_structure(len(gradients), is_pair, specs)
        checked = checks.check_compiled_gradients(
            each(shape_of, gradients), each(dtype_of, gradients), specs
        )
        # MindSpore 2.7 warns of a check whose result is unused
        return gradients if checked else ()

    def by_name(self, gradients: NamedGradients) -> Gradients:
        ordered: Gradients = ()
        for name in self.names_of(tuple(gradients.keys())):
            ordered = (*ordered, gradients[name])
        return ordered

    def adds_certainly(self, weight: Weight) -> bool:
        """True if the micro-batch is added whatever it holds, and its weight is a
        constant of the program.
        """
        if weight is None:
            checks.check_compiled_no_weight(self.use_of_weights)
        self.note_weighed(weight is not None)
        if self.options.on_overflow == "drop_micro_batch" or isinstance(weight, Tensor):
            return False
        checks.check_compiled_weight(weight)
        certain: bool = weight is None or is_certain(weight)
        return certain

    def amount(self, weight: Weight) -> Tensor | None:
        """Return a weight as a scalar of the dtype of `State.weight`; None stays
        None.
        """
        return None if weight is None else self.scalar(number_of(weight))

    def loss_number(self, loss: Number) -> Tensor:
        if isinstance(loss, Tensor):
            checks.check_compiled_shape("loss", loss.shape)
            return self.scalar(loss.reshape(()))
        checks.check_compiled_loss(loss)
        return self.scalar(loss)

    def scalar(self, number: Number) -> Tensor:
        if isinstance(number, Tensor):
            return number.astype(self.float_dtype)
        if self.float_dtype == ms.float64 and is_constant(number):
            return float64_of(number)
        return self.one * number

    def add(
        self, gradients: Gradients, weight: Weight, loss: Loss
    ) -> tuple[Fields, Tensor | None, Tensor | None]:
        """Add one micro-batch of ordered gradients to the sums.

        Returns the state after it; the event, if a gradient may be dropped; the value
        of `Knowledge.loss`, if its loss is passed. The caller then asks `is_full` and
        `needs_first`, and calls `write_added` and `see_first`: the compiler drops an
        ``if`` on a flag that comes out of a function that writes.
        """
        before, known, told = self.read(), self.storage.knowledge, None
        if self.adds_certainly(weight):
            amount = self.amount(weight)
            if loss is not None:
                told = known.compiled_certain(self.loss_number(loss), amount)
            factor = (
                None if weight is None or self.options.reduction != "mean" else amount
            )
            gradient_sum.compiled_add(self.storage.sums, gradients, factor, None)
            return (
                kit.accumulate(
                    before, self.one if weight is None else amount, self.true, chosen
                ),
                None,
                told,
            )
        amount = self.one if weight is None else self.amount(weight)
        factor = kit.contribution(amount, self.options)
        finite = self.true
        if self.options.on_overflow == "drop_micro_batch":
            finite = gradient_sum.compiled_finite(
                self.storage.sums, gradients, factor
            ) | (amount == 0)
        state = kit.accumulate(before, amount, finite, where)
        never, dropped = (
            state[MICRO_STEP] < 0,
            (finite == False).astype(self.float_dtype),  # noqa: E712
        )
        event = self.event(
            never, never, dropped * (state[MICRO_STEP] + 1), self.grad_norm()
        )
        adds = kit.usable(before, amount, finite)
        if loss is not None:
            told = known.compiled_told(self.loss_number(loss), amount, adds)
        gradient_sum.compiled_add(
            self.storage.sums, gradients, None if weight is None else factor, adds
        )
        return state, event, told

    def write_added(
        self, state: Fields, event: Tensor | None, told: Tensor | None, weight: Weight
    ) -> bool:
        if event is None:
            # The same numbers as the state's. One operator each, where adding and
            # assigning are two.
            ops.assign_add(self.storage.micro_step, self.one_step)
            ops.assign_add(
                self.storage.weight, self.one if weight is None else self.amount(weight)
            )
            if told is not None:
                ops.assign_add(self.storage.knowledge.loss, told)
            return self.write_size(state)
        self.write_open(state, event)
        if told is not None:
            ops.assign(self.storage.knowledge.loss, told)
        return self.write_size(state)

    def close(self, update: Update, untold: bool) -> bool:
        """End the window: make the `update` with its gradients, or not at all.

        `untold`: some micro-batch did not tell its loss.
        """
        if self.workers is not None:
            self.workers.compiled_join()
        return self.close_joined(update, untold)

    def close_joined(self, update: Update, untold: bool) -> bool:
        self.note_decision()
        self.apply(update)
        return self.finish(untold)

    def note_decision(self) -> bool:
        notes, options = self.notes, self.options
        notes.write_state(
            self.storage.weight, self.storage.overflow, self.storage.loss_scale
        )
        if self.calls_steps and self.workers is None:
            notes.write_terms(self.storage.terms)
        if not self.measures:
            return notes.write_decision(
                *kit.decide(
                    self.sized(notes.state()),
                    self.nan,
                    self.true,
                    options,
                    where,
                    self.storage.largest,
                )
            )
        norm, right = gradient_sum.compiled_measure(self.packed(), self.float_dtype)
        notes.write_measure(norm, right)
        self.measure_again()
        state, norm = self.sized(notes.state()), notes.norm.value()
        finite = self.fits(state, ops.isfinite(norm), options)
        if self.sharded and self.workers is not None:
            own, sound = gradient_sum.robust_measure(
                self.packed_shards(), self.float_dtype
            )
            norm = self.workers.compiled_norm_of_all(
                norm, where(finite & sound, own, self.infinity)
            )
            finite = ops.isfinite(norm)
        return notes.write_decision(
            *kit.decide(state, norm, finite, options, where, self.storage.largest)
        )

    def measure_again(self) -> bool:
        """Note the norm in the robust way if the squares overflow or vanish: inf if it
        is not finite.
        """
        # A condition is a Parameter as it is: `not` would be an operator more in each
        # window.
        if self.notes.measured:
            pass
        else:
            norm, finite = gradient_sum.robust_measure(self.packed(), self.float_dtype)
            ops.assign(self.notes.norm, where(finite, norm, self.infinity))
        return True

    def sized(self, state: Fields) -> Fields:
        """Return `state`, with no weight and an overflow if the user's function gave a
        size below 1.
        """
        if self.calls_steps and self.workers is None:
            (
                micro_step,
                optimizer_step,
                skipped,
                weight,
                overflow,
                loss_scale,
                tracker,
            ) = state
            sound = self.size_code[STEPS] * self.notes.terms.value()[STEPS] >= 1
            weight = where(sound, weight, ops.zeros_like(weight))
            overflow = overflow | (sound == False)  # noqa: E712
            return (
                micro_step,
                optimizer_step,
                skipped,
                weight,
                overflow,
                loss_scale,
                tracker,
            )
        return state

    def fits(self, state: Fields, finite: Tensor, options: Options) -> Tensor:
        if self.storage.narrowed:
            divides = kit.divisor(state, options, where)
            finite = finite & gradient_sum.compiled_fits(
                self.storage.sums, self.handed_over(divides), self.storage.handed
            )
        return finite

    def apply(self, update: Update) -> bool:
        if self.notes.apply:
            update(self.gradients(self.notes.divisor.value()))
        return True

    def finish(self, untold: bool) -> bool:
        """Clear the sums, assign the state after the window and its last event;
        `untold` as for `close`.
        """
        notes = self.notes
        apply, overflow = notes.applied & self.true, notes.overflow & self.true
        before, grad_norm = self.read(), notes.grad_norm.value()
        loss = self.storage.knowledge.compiled_after(before)
        if untold and self.workers is None:
            loss = self.unknown
        after = kit.close(before, apply, overflow, self.options, where)
        gradient_sum.compiled_clear(self.storage.sums, after[WEIGHT])
        if self.workers is not None:
            self.workers.window_ended()
        ops.assign(self.storage.knowledge.loss, loss)
        self.write_empty(self.event(apply, apply == False, overflow, grad_norm))  # noqa: E712
        return self.write_counters(after)

    def flush(self, update: Update) -> Tensor:
        """Close the open window; returns whether there was one, a bool Tensor of shape
        ().
        """
        is_open = self.storage.micro_step.value() > 0
        if is_open:
            self.close(update, False)
        else:
            self.write_nothing_done()
        return is_open

    def write_nothing_done(self) -> Tensor:
        never = self.storage.micro_step.value() < 0
        return self.write_event(self.event(never, never, never, self.grad_norm()))

    def discard(self) -> bool:
        state = kit.discard(self.read())
        never = state[MICRO_STEP] < 0
        event = self.event(never, never, never, self.grad_norm())
        loss = self.storage.knowledge.compiled_forgotten()
        ops.assign(self.storage.knowledge.loss, loss)
        gradient_sum.compiled_clear(self.storage.sums, state[WEIGHT])
        if self.workers is not None:
            self.workers.window_ended()
        return self.write_open(state, event)

    def gradients(self, divides: Tensor) -> tuple[Tensor, ...]:
        return gradient_sum.divide(
            self.storage.sums, self.handed_over(divides), self.storage.handed
        )

    def handed_over(self, divides: Tensor) -> Tensor:
        """Return `divides` without the scale that the inner optimizer divides by
        itself.
        """
        if self.storage.inner_scale == 1:
            return divides
        return divides / self.inner_scale
