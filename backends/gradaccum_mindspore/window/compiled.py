"""The open window in compiled code (`mindspore.jit` or graph mode), where the state
consists of Tensors. The code in this file follows these rules:

- Each method reads all values that it needs before its first write, because the
  compiler drops operations that seem to have no effect. The end of a window is the only
  place where a method reads what another method has just written: `decide` reads the
  state after the last micro-batch, and `finish` reads the gradient sums and the
  decision whether to apply the update.
- No branch of an ``if`` returns a value that was computed in the branch. A comment in
  `CompiledWindow` gives the reason.
- Every function returns something, because MindSpore would process a returned None in
  the Python interpreter.
- No method calls a global function of the same name, because the compiler confuses the
  two. So the methods call ``kit.close`` and ``kit.discard`` through their module.

The compiler copies everything that follows an ``if`` in a function into both branches.

Python numbers are constants of the program, and so are the structure, shapes and dtypes
of its arguments. So an invalid argument raises an error while MindSpore compiles the
program.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any

import mindspore as ms
from mindspore import Parameter, Tensor, ops
from mindspore.ops import constexpr

from gradaccum import kit
from gradaccum.kit import Fields, Options
from gradaccum_mindspore import checks, gradient_sum
from gradaccum_mindspore.checks import Loss, Weight
from gradaccum_mindspore.gradient_sum import (
    DType,
    Gradients,
    Number,
    dtype_of,
    map_over,
    shape_of,
    where,
)
from gradaccum_mindspore.mindspore_private import CellOfOnePhase
from gradaccum_mindspore.state import GRAD_NORM, STEPS, Storage, sizes_of
from gradaccum_mindspore.update import Update

# The indices of the state's fields. The code indexes the fields instead of unpacking
# them, because MindSpore would warn about a field that is unpacked but not used.
MICRO_STEP = 0
OPTIMIZER_STEP = 1
SKIPPED_WINDOWS = 2
WEIGHT = 3
OVERFLOW = 4
LOSS_SCALE = 5
GROWTH_TRACKER = 6

# If every weight of a window lies between these limits, each weight and the sum of all
# weights are finite and above 0 in float32.
SMALLEST_WEIGHT = 2.0**-40
LARGEST_WEIGHT = 2.0**40

NUMBERS = count()
"""Numbers that make the names of temporary Parameters unique. Compiled code does not
accept two Parameters with the same name.
"""


def note(name: str, value: Tensor) -> Parameter:
    """Return a Parameter with a unique name, which compiled code uses as a temporary
    variable. It is not saved in checkpoints.
    """
    name = f"gradaccum.note{next(NUMBERS)}.{name}"
    return gradient_sum.hidden_parameter(value, name)


def exact_in(dtype: DType, options: Options) -> Options:
    """Return `options`. If `dtype` is float64, ``clip_norm`` and ``skip_norm`` are
    converted to Tensors, because MindSpore rounds a Python number to float32.
    """
    if dtype != ms.float64:
        return options
    limits = {
        name: Tensor(getattr(options, name), dtype)
        for name in ("clip_norm", "skip_norm")
        if getattr(options, name) is not None
    }
    return options._replace(**limits)


def number_of(weight: Number) -> Number:
    """Return the weight, reshaped to shape () if it is a Tensor. If the weight is an
    invalid constant of the compiled program, raise an error while MindSpore compiles
    the program.
    """
    if isinstance(weight, Tensor):
        return weight.reshape(())
    checks.check_compiled_weight(weight)
    return weight


@constexpr  # type: ignore[untyped-decorator]
def is_constant(number: float | None) -> bool:
    """True if `number` is a constant of the compiled program. MindSpore runs this
    function while it compiles the program. If the number is not known at that time,
    MindSpore passes None to this function.
    """
    return number is not None


@constexpr  # type: ignore[untyped-decorator]
def is_certain(weight: float | None) -> bool:
    """True if `weight` is a constant of the compiled program that is certainly above 0
    and finite in float32.
    """
    return weight is not None and bool(SMALLEST_WEIGHT <= weight <= LARGEST_WEIGHT)


@constexpr  # type: ignore[untyped-decorator]
def float64_of(number: float) -> Tensor:
    """Return a number as a float64 Tensor, because MindSpore rounds a Python number to
    float32.
    """
    return Tensor(number, ms.float64)


def note_weighed_in(storage: Storage) -> Callable[[bool], bool]:
    """Return a function that records whether micro-batches have a weight. The function
    runs only while MindSpore compiles a program. This happens once for each micro-batch
    size.
    """

    @constexpr(reuse_result=False)  # type: ignore[untyped-decorator]
    def note_weighed(is_weighed: bool) -> bool:
        storage.sizes.weighed = is_weighed
        return is_weighed

    while_compiling: Callable[[bool], bool] = note_weighed
    return while_compiling


def first(condition: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Return `a`. This function is used instead of ``where`` if the condition is known
    to be true.
    """
    return a


class CompiledWindow(CellOfOnePhase):
    """A window whose methods MindSpore compiles, and whose state consists of Tensors.
    `PyNativeWindow` has the same methods for PyNative mode. `workers` is a
    `WorkerGroup` if several workers share the window, and otherwise None.
    """

    # At the end of a window, the decision whether to update is passed through these
    # Parameters. If one branch computes a value and another branch uses it, MindSpore's
    # runtime copies the value. If ``steps`` is even, the runtime never frees the copy,
    # which costs 12 KiB of host memory per window. So at the end of a window, no
    # computed value is passed into or out of a branch.
    divisor: Parameter
    is_applied: Parameter
    nothing: Parameter
    """A Parameter that always contains 0, with which `finish` clears the gradient sums.
    A constant 0 cannot be used, because the compiler would turn the zeros for the sums
    into constants, which together are as large as the model.
    """

    def __init__(
        self, storage: Storage, options: Options, update: Update, workers: Any
    ) -> None:
        super().__init__(auto_prefix=False)
        self.storage = storage
        self.update = update
        self.workers = workers
        self.steps: Any = options.steps
        self.sizes = sizes_of(options.steps)
        self.has_size_function = callable(self.sizes)
        self.ends_by_weight = isinstance(options.steps, kit.UntilWeight)
        self.use_of_weights = kit.use_of_weights(options)
        self.measures = kit.measures(options)
        # `steps` is removed, because the compiler cannot handle a function or an object
        # inside a named tuple.
        plain_options = options._replace(steps=None)
        self.options = exact_in(storage.float_dtype, plain_options)
        constant_rule = options.scale_rule._replace(init_scale=1.0)
        self.scale_moves = constant_rule != kit.ScaleRule()
        self.float_dtype = storage.float_dtype
        self.true = Tensor(True)
        self.false = Tensor(False)
        self.no_step = Tensor(0, ms.int32)
        self.one_step = Tensor(1, ms.int32)
        self.zero = Tensor(0.0, storage.float_dtype)
        self.one = Tensor(1.0, storage.float_dtype)
        self.nan = Tensor(float("nan"), storage.float_dtype)
        self.infinity = Tensor(float("inf"), storage.float_dtype)
        unit = -1 if self.ends_by_weight else 1
        self.size_code = Tensor([0] * STEPS + [unit], ms.int32)
        *other_codes, _ = storage.terms.tolist()
        self.other_codes = Tensor([*other_codes, 0], ms.int32)
        self.note_weighed = note_weighed_in(storage)
        # With plain assignments, the Cell would register these Parameters as its own.
        for name, value in (
            ("divisor", self.one),
            ("is_applied", self.false),
            ("nothing", self.zero),
        ):
            object.__setattr__(self, name, note(name, value))

    def read(self) -> Fields:
        """Return the state as plain Tensors, in the order of `gradaccum.kit.State`'s
        fields.
        """
        storage = self.storage
        return (
            storage.micro_step.value(),
            storage.optimizer_step.value(),
            storage.skipped_windows.value(),
            storage.weight.value(),
            storage.overflow & self.true,
            storage.loss_scale.value(),
            storage.growth_tracker.value(),
        )

    def event(
        self, applied: Tensor, skipped: Tensor, overflow: Tensor, grad_norm: Tensor
    ) -> Tensor:
        values = (applied, skipped, overflow, grad_norm)
        return ops.stack([value.astype(self.float_dtype) for value in values])

    def empty_event(self) -> Tensor:
        """Return the outcome of a call that closed no window: three flags that are
        false, and the last gradient norm.
        """
        never = self.storage.micro_step.value() < 0
        return self.event(never, never, never, self.last_norm())

    def last_norm(self) -> Tensor:
        return self.storage.last_event.value()[GRAD_NORM]

    def write_open(self, state: Fields, event: Tensor) -> bool:
        """Write into `self.storage` what a micro-batch or a discard changes: the number
        of micro-batches, the weight and the overflow flag from `state`, and the outcome
        `event`.
        """
        ops.assign(self.storage.micro_step, state[MICRO_STEP].astype(ms.int32))
        ops.assign(self.storage.weight, state[WEIGHT].astype(self.float_dtype))
        ops.assign(self.storage.overflow, state[OVERFLOW])
        ops.assign(self.storage.last_event, event)
        return True

    def write_counters(self, state: Fields) -> bool:
        storage = self.storage
        ops.assign(storage.optimizer_step, state[OPTIMIZER_STEP].astype(ms.int32))
        ops.assign(storage.skipped_windows, state[SKIPPED_WINDOWS].astype(ms.int32))
        if self.scale_moves:
            ops.assign(storage.loss_scale, state[LOSS_SCALE].astype(ms.float32))
            ops.assign(storage.growth_tracker, state[GROWTH_TRACKER].astype(ms.int32))
        return True

    def size(self, optimizer_step: Tensor) -> Tensor:
        """Return the size of the window that begins when `optimizer_step` updates have
        been applied. If the size comes from the user's function, it may be below 1 (see
        `with_checked_size`).
        """
        if self.has_size_function:
            number = self.sizes(optimizer_step)
            if isinstance(number, Tensor):
                return number.reshape(())
            return 0 * optimizer_step + number
        return kit.steps_at(self.sizes, optimizer_step, where)

    def is_full(self, state: Fields) -> Tensor:
        if self.has_size_function:
            # `kit.ends` is not called here, because the compiler would mistake one of
            # its Tensors for a function.
            place = WEIGHT if self.ends_by_weight else MICRO_STEP
            return state[place] >= self.size(state[OPTIMIZER_STEP])
        return kit.ends(state, self.steps, where)

    def write_size(self, state: Fields) -> bool:
        if self.storage.size_varies:
            size = self.size(state[OPTIMIZER_STEP]).astype(ms.int32)
            codes = self.other_codes + self.size_code * size
            ops.assign(self.storage.terms, codes)
        return True

    def checked_gradients(self, gradients: Gradients) -> Gradients:
        gradients = tuple(gradients)
        is_right = checks.check_compiled_gradients(
            map_over(shape_of, gradients),
            map_over(dtype_of, gradients),
            self.storage.specs,
        )
        # MindSpore 2.7 warns if the result of a check is unused.
        return gradients if is_right else ()

    def is_certainly_added(self, weight: Weight) -> bool:
        """True if the micro-batch will be added regardless of its gradients, and its
        weight is a constant of the compiled program.
        """
        if weight is None:
            checks.check_compiled_no_weight(self.use_of_weights)
        self.note_weighed(weight is not None)
        if self.options.on_overflow == "drop_micro_batch" or isinstance(weight, Tensor):
            return False
        checks.check_compiled_weight(weight)
        is_known: bool = weight is None or is_certain(weight)
        return is_known

    def weight_number(self, weight: Weight) -> Tensor:
        """Return a weight as a scalar Tensor of the dtype in which the window's weight
        is stored. None means 1.
        """
        return self.one if weight is None else self.scalar(number_of(weight))

    def scalar(self, number: Number) -> Tensor:
        if isinstance(number, Tensor):
            return number.reshape(()).astype(self.float_dtype)
        if self.float_dtype == ms.float64 and is_constant(number):
            return float64_of(number)
        return self.one * number

    def add(
        self, gradients: Gradients, weight: Weight, loss: Loss
    ) -> tuple[Fields, Tensor | None, Tensor | None]:
        """Add the checked gradients of one micro-batch to the window's gradient sums.

        Return three values:

        - the state after the micro-batch;
        - the outcome of the call, or None if the micro-batch is certainly added (see
          `is_certainly_added`);
        - the numbers to add to `WindowLoss.loss`, or None if no loss was passed.

        The caller then passes the state to `is_full`, and all three values to
        `write_added`. `is_full` is a separate method that writes nothing, because the
        compiler drops an ``if`` whose condition comes from a function that writes
        Parameters.
        """
        state = self.read()
        weight_number = self.weight_number(weight)
        factor = None
        if weight is not None and self.options.reduction == "mean":
            factor = weight_number
        if self.is_certainly_added(weight):
            after = kit.accumulate(state, weight_number, self.true, first)
            parts = self.parts_of_loss(loss, weight_number, None)
            gradient_sum.compiled_add(self.storage.sums, gradients, factor, None)
            return after, None, parts
        is_finite = self.true
        if self.options.on_overflow == "drop_micro_batch":
            is_finite = gradient_sum.compiled_finite(
                self.storage.sums, gradients, self.one if factor is None else factor
            ) | (weight_number == 0)
        is_added = kit.usable(state, weight_number, is_finite)
        after = kit.accumulate(state, weight_number, is_finite, where)
        never = after[MICRO_STEP] < 0
        is_dropped = (is_finite == False).astype(self.float_dtype)  # noqa: E712
        # A flag is true only while the number that it stores equals micro_step + 1.
        flag = is_dropped * (after[MICRO_STEP] + 1)
        event = self.event(never, never, flag, self.last_norm())
        parts = self.parts_of_loss(loss, weight_number, is_added)
        gradient_sum.compiled_add(self.storage.sums, gradients, factor, is_added)
        return after, event, parts

    def parts_of_loss(
        self, loss: Loss, weight: Tensor, is_added: Tensor | None
    ) -> Tensor | None:
        if loss is None:
            return None
        return self.storage.window_loss.compiled_parts(
            self.scalar(loss), weight, is_added
        )

    def write_added(
        self, state: Fields, event: Tensor | None, parts: Tensor | None, weight: Weight
    ) -> bool:
        """Write the values that `add` returned into `self.storage`: the state, the
        outcome of the call, and the numbers for the window's loss. Also write the size
        of the open window.
        """
        storage = self.storage
        if event is None:
            # These assignments update the counters to the values in `state`. Each is a
            # single operator, whereas an addition followed by an assignment would need
            # two.
            ops.assign_add(storage.micro_step, self.one_step)
            ops.assign_add(storage.weight, self.weight_number(weight))
        else:
            self.write_open(state, event)
        if parts is not None:
            ops.assign_add(storage.window_loss.loss, parts)
        return self.write_size(state)

    def close(self) -> bool:
        """Close the window: update the parameters with its gradients, or skip the
        update.
        """
        if self.workers is not None:
            self.workers.compiled_all_reduce()
        return self.close_reduced()

    def close_reduced(self) -> bool:
        self.decide()
        return self.finish()

    def decide(self) -> bool:
        """Decide whether the window's update is applied or skipped. Write the decision
        into the Parameters `is_applied` and `divisor`, which `finish` reads. Write the
        outcome of the call, the window's loss, and the state with which the next window
        begins into `self.storage`.
        """
        storage = self.storage
        state = self.read()
        norm = self.nan
        is_finite = self.true
        if self.measures:
            norm = gradient_sum.compiled_norm(storage.shared_sums, self.float_dtype)
            is_finite = self.fits(state, ops.isfinite(norm))
        if self.measures and len(storage.sharded_places) > 0:
            sharded_norm = gradient_sum.compiled_norm(
                storage.sharded_sums, self.float_dtype
            )
            is_sound = is_finite & ops.isfinite(sharded_norm)
            sharded_norm = where(is_sound, sharded_norm, self.infinity)
            norm = self.workers.global_norm(norm, sharded_norm)
            is_finite = ops.isfinite(norm)
        apply, overflow, divisor, grad_norm = kit.decide(
            self.with_checked_size(state),
            norm,
            is_finite,
            self.options,
            where,
            storage.largest_number,
        )
        losses = storage.window_loss.compiled_after_window(state)
        after = kit.close(state, apply, overflow, self.options, where)
        skipped = apply == False  # noqa: E712
        event = self.event(apply, skipped, overflow, grad_norm)
        ops.assign(self.divisor, divisor.astype(self.float_dtype))
        ops.assign(self.is_applied, apply)
        ops.assign(storage.window_loss.loss, losses)
        # `after` contains the same zeros, but computing them would take extra
        # operators.
        ops.assign(storage.micro_step, self.no_step)
        ops.assign(storage.weight, self.zero)
        ops.assign(storage.overflow, self.false)
        ops.assign(storage.last_event, event)
        return self.write_counters(after)

    def with_checked_size(self, state: Fields) -> Fields:
        """Return `state`. If the user's function returned a window size below 1, set
        the weight to 0 and the overflow flag to true, so that the window is skipped.
        """
        if not self.has_size_function or self.workers is not None:
            return state
        size = self.size_code[STEPS] * self.storage.terms.value()[STEPS]
        is_sound = size >= 1
        weight = where(is_sound, state[WEIGHT], ops.zeros_like(state[WEIGHT]))
        overflow = state[OVERFLOW] | (is_sound == False)  # noqa: E712
        return (*state[:WEIGHT], weight, overflow, *state[LOSS_SCALE:])

    def fits(self, state: Fields, is_finite: Tensor) -> Tensor:
        if self.storage.narrow_places:
            divisor = kit.divisor(state, self.options, where)
            is_finite = is_finite & gradient_sum.compiled_fits(
                self.storage.sums, divisor, self.storage.gradient_dtypes
            )
        return is_finite

    def finish(self) -> bool:
        """Update the parameters, unless the update is skipped. Then clear the gradient
        sums. One method does both, because a separate graph that only clears the sums
        would take longer. The compiled program has two branches, one with the update
        and one without, and each branch clears the sums.
        """
        if self.is_applied:
            gradients = gradient_sum.compiled_divided(
                self.storage.sums, self.divisor.value(), self.storage.gradient_dtypes
            )
            self.update(gradients)
        gradient_sum.compiled_clear(self.storage.sums, self.nothing.value())
        return True

    def flush(self) -> Tensor:
        """Close the open window; return whether a window was open, as a bool Tensor of
        shape ().
        """
        is_open = self.storage.micro_step.value() > 0
        if is_open:
            self.close()
        else:
            ops.assign(self.storage.last_event, self.empty_event())
        return is_open

    def discard(self) -> bool:
        state = kit.discard(self.read())
        event = self.empty_event()
        losses = self.storage.window_loss.compiled_with_total(self.zero, self.zero)
        ops.assign(self.storage.window_loss.loss, losses)
        gradient_sum.compiled_clear(self.storage.sums, state[WEIGHT])
        return self.write_open(state, event)
