"""The state of a wrapped optimizer: one `mindspore.Parameter` for each field of the
state, and one Parameter with the gradient sum for each parameter of the model.

The state consists of Parameters, because PyNative code, compiled functions and
checkpoints can all use them. The names of these Parameters depend only on the names of
the model's parameters and on the ``name=`` option, so a run that resumes in another
process finds them again. In the names of the gradient sums, ``grad_sum`` comes last. If
it came first, `mindspore.load_param_into_net` would load a saved ``grad_sum.weight``
into a ``weight`` that is missing from the checkpoint. A gradient sum is zero while no
window is open.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import mindspore as ms
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops

from gradaccum import StepResult, kit
from gradaccum.kit import (
    FIELD_DTYPES,
    Fields,
    Options,
    Schedule,
    State,
    Terms,
    UntilWeight,
)
from gradaccum_mindspore.extensions import (
    Extension,
    ListenerCalls,
    OpenWindowWarning,
    WindowLoss,
)
from gradaccum_mindspore.gradient_sum import (
    HALF,
    DType,
    hidden_parameter,
    narrows,
    sum_dtype,
    write_numbers,
)
from gradaccum_mindspore.loss_scale import key_of
from gradaccum_mindspore.master_weights import MasterWeights
from gradaccum_mindspore.mindspore_private import call_after

Checkpoint = Mapping[str, Parameter | Tensor]
"""A checkpoint in the form that `mindspore.load_checkpoint` returns."""

# The option ``steps`` may be a function that returns the size of a window. Python code
# calls it with an int, and compiled code calls it with an int32 Tensor. Outside
# compiled code, an invalid size raises an error. In compiled code, a window with a size
# below 1 is skipped as if it had overflowed.


def sizes_of(steps: Schedule) -> Any:
    return steps.weight if isinstance(steps, UntilWeight) else steps


def window_size(steps: Schedule, optimizer_step: int) -> Schedule:
    """Return the size of the window that begins after `optimizer_step` updates: a
    number of micro-batches, a weight (`UntilWeight`), or None if only ``flush`` closes
    windows.
    """
    if kit.is_known(steps):
        size: Schedule = kit.steps_at(steps, optimizer_step, kit.select)
        return size
    function = sizes_of(steps)
    try:
        number = function(optimizer_step)
    except Exception:
        # Pass a Tensor, because a function that is written for compiled code may use
        # operators that accept only Tensors.
        number = function(Tensor(optimizer_step, ms.int32))
    if isinstance(number, Tensor):
        number = number.item()
    if isinstance(steps, UntilWeight):
        number = UntilWeight(number)
    return kit.require_steps(number, optimizer_step, steps)


def with_known_size(options: Options, optimizer_step: int) -> Options:
    return options._replace(steps=window_size(options.steps, optimizer_step))


PACKAGE = "gradaccum"
WORKERS = "workers"
"""The last part of the name of the Parameter that stores the worker's rank and the
number of workers.
"""


def state_prefix(name: str) -> str:
    """Return the name prefix of the Parameters that store the state. No layer's name
    starts with this prefix.
    """
    return name if name == PACKAGE else f"{name}.{PACKAGE}"


def suffixes(prefix: str) -> tuple[str, str]:
    """Return the two suffixes that are added to a model parameter's name: the suffix
    for its gradient sum, and the suffix for its master weight.
    """
    name = prefix.removesuffix(f".{PACKAGE}")
    return f".{name}.grad_sum", f".{name}.master"


def prefixes_in(checkpoint: Checkpoint) -> list[str]:
    """Return the name prefix of each wrapped optimizer saved in a checkpoint."""
    ending = ".micro_step"
    return [name.removesuffix(ending) for name in checkpoint if name.endswith(ending)]


DTYPES = {"int32": ms.int32, "float32": ms.float32, "bool": ms.bool_}
GRAD_NORM = 3
"""The index of the gradient norm in `Storage.last_event`."""
STEPS = 1 + Terms._fields.index("steps")  # The format is at index 0.
"""The index of the open window's size in the encoded options, `Storage.terms`."""
WEIGHT_FIX = (
    "pass the number of items as weight= with each micro-batch, as"
    " gradaccum_mindspore.TrainOneStepCell does"
)
INVALID = -1
"""The value of ``micro_step`` after an exception has left the window partially written.
"""


class Storage(nn.Cell):  # type: ignore[misc]
    """The Parameters that store the state of one wrapped optimizer, and the objects
    that observe its windows.
    """

    def __init__(
        self,
        parameters: Sequence[Parameter],
        options: Options,
        name: str,
        place: tuple[int, int] | None,
        sharded_places: tuple[int, ...],
    ) -> None:
        super().__init__(auto_prefix=False)
        self.options = options
        self.prefix = state_prefix(name)
        self.sum_suffix, master_suffix = suffixes(self.prefix)
        self.add_sums(parameters, sharded_places)
        half_parameters = parameters if options.master_weights else ()
        self.masters = MasterWeights(half_parameters, master_suffix)
        self.size_varies = not isinstance(sizes_of(options.steps), int | None)
        self.scale_key = key_of(options)
        """A number that identifies this optimizer for `require_read`, which checks that
        the training step has read the loss scale. It is `NEVER` if there is no scale.
        """
        self.add_state()
        self.has_workers = place is not None
        self.place = place or (0, 1)
        """The pair (this worker's rank, number of workers)."""
        if self.has_workers:
            self.saved_place = self.entry(WORKERS, self.place, ms.int32)
            """A Parameter that contains a copy of `place`, so that `place` is saved in
            checkpoints.
            """
        self.window_loss = WindowLoss(self.prefix, options, self.float_dtype)
        self.sizes = kit.Sizes(options.reduction, WEIGHT_FIX)
        self.listener_calls = ListenerCalls(self)
        self.open_window_warning = OpenWindowWarning(self)
        self.extensions: tuple[Extension, ...] = (
            self.listener_calls,
            self.open_window_warning,
        )
        self.schedulers: WeakSet[Any] = WeakSet()
        """The wrapped learning-rate schedulers of the inner optimizer."""
        for field in FIELD_DTYPES:
            # The loss scale is left out, because the user may call its `set_data`
            # without loading a checkpoint.
            if field != "loss_scale":
                call_after(getattr(self, field), "set_data", self.note_loaded)

    def add_sums(
        self, parameters: Sequence[Parameter], sharded_places: tuple[int, ...]
    ) -> None:
        options = self.options
        self.specs = tuple(
            (parameter.name, tuple(parameter.shape), parameter.dtype)
            for parameter in parameters
        )
        sum_dtypes = [
            sum_dtype(parameter.dtype, options.accumulate_dtype)
            for parameter in parameters
        ]
        has_float64 = ms.float64 in sum_dtypes
        self.float_dtype = ms.float64 if has_float64 else ms.float32
        """The dtype of the window's weight and of gradient norms."""
        self.largest_number = kit.largest_number(float64_weight=has_float64)
        self.gradient_dtypes = tuple(
            ms.float32 if options.master_weights and dtype in HALF else dtype
            for _, _, dtype in self.specs
        )
        """For each parameter, the dtype of the gradient that the inner optimizer gets.
        """
        self.narrow_places = tuple(
            position
            for position, dtype in enumerate(sum_dtypes)
            if narrows(dtype, self.gradient_dtypes[position])
        )
        """The indices of the gradient sums that can overflow when they are cast to the
        inner optimizer's dtype, even if the sums themselves are finite.
        """
        self.sums = ParameterTuple(
            [
                hidden_parameter(
                    ops.zeros(parameter.shape, dtype), parameter.name + self.sum_suffix
                )
                for parameter, dtype in zip(parameters, sum_dtypes, strict=True)
            ]
        )
        self.sharded_places = sharded_places
        """The indices of the gradient sums that are not all-reduced, because their
        parameters are sharded.
        """
        sharded_sums = tuple(self.sums[place] for place in sharded_places)
        shared_sums = tuple(
            total
            for place, total in enumerate(self.sums)
            if place not in sharded_places
        )
        # With plain assignments, the Cell would register these Parameters a second
        # time.
        object.__setattr__(self, "sharded_sums", sharded_sums)
        object.__setattr__(self, "shared_sums", shared_sums)

    def add_state(self) -> None:
        first_state = kit.initial_state(self.options.scale_rule.init_scale)
        for field, value in first_state._asdict().items():
            dtype = (
                self.float_dtype if field == "weight" else DTYPES[FIELD_DTYPES[field]]
            )
            setattr(self, field, self.entry(field, value, dtype))
        terms = kit.terms_of(with_known_size(self.options, 0), 0)
        self.terms = self.entry("terms", kit.encode_terms(terms), ms.int32)
        """The options on which the open window depends, encoded as integers by
        `gradaccum.kit.encode_terms` so that a checkpoint can store them.
        """
        self.last_event = self.entry("last_event", [0.0] * 4, self.float_dtype)
        """The outcome of the last call as four numbers: the flags `applied`, `skipped`
        and `overflow` of a `StepResult`, and `grad_norm`. A false flag is stored as 0,
        and a true flag is stored as ``micro_step + 1``.

        A stored flag counts as true only as long as it equals ``micro_step + 1``. When
        the next micro-batch increases ``micro_step``, the flag therefore becomes false
        without being written again.
        """

    def entry(self, name: str, value: object, dtype: DType) -> Parameter:
        return hidden_parameter(Tensor(value, dtype), f"{self.prefix}.{name}")

    def note_loaded(self) -> None:
        """Notify the schedulers, and the objects that observe the windows, after a
        checkpoint has been loaded. `mindspore.load_param_into_net` calls this method
        once for each field except the loss scale.
        """
        for observer in (*self.extensions, *self.schedulers):
            observer.state_loaded()

    def between_windows(self) -> None:
        """Call the listeners and step the schedulers between two windows that the same
        ``flush`` closes, because the training loop is waiting in ``flush`` and cannot
        do so itself. A ``flush`` closes several windows if other workers still have
        micro-batches.
        """
        self.listener_calls.between_windows()
        for scheduler in self.schedulers:
            scheduler.follow()

    # The methods below read and write the state from Python. In Python, running an
    # operator takes longer than reading a scalar, so values that have not changed are
    # not written.

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Mark the window as invalid if an exception leaves it partially written. From
        then on, `pull` raises an error until the window is discarded or a checkpoint is
        loaded.
        """
        try:
            yield
        except BaseException:
            write_numbers(self.micro_step, INVALID)
            raise

    def at_rest(self, state: Fields) -> State:
        """Return `state` with each number rounded to the dtype in which it will be
        stored.
        """
        return kit.at_rest(State(*state), float64_weight=self.float_dtype == ms.float64)

    def read(self) -> State:
        return State(*(getattr(self, field).item() for field in FIELD_DTYPES))

    def pull(self) -> State:
        """Return the state; raise an error if an exception has left the window
        partially written.
        """
        state = self.read()
        if state.micro_step == INVALID:
            raise kit.half_made_error()
        return state

    def push(self, state: Fields, before: State) -> State:
        """Write the fields of `state` that differ from `before`, the state that was
        last read or written. Return the state as it is now stored.
        """
        rounded_state = self.at_rest(state)
        for field, old, new in zip(FIELD_DTYPES, before, rounded_state, strict=True):
            if new != old:
                write_numbers(getattr(self, field), new)
        return rounded_state

    def push_event(
        self,
        applied: bool = False,
        skipped: bool = False,
        overflow: bool = False,
        grad_norm: float | None = None,
        *,
        micro_step: int = 0,
    ) -> None:
        """Store the outcome of a call, which the next `StepResult` reports. If
        `grad_norm` is None, keep the last gradient norm.
        """
        last_event = self.last_event.tolist()
        if grad_norm is None:
            grad_norm = last_event[GRAD_NORM]
        flags = (applied, skipped, overflow)
        event = [*(float(flag * (micro_step + 1)) for flag in flags), grad_norm]
        if event != last_event:
            write_numbers(self.last_event, event)

    def push_size(self, size: Schedule) -> None:
        """Store the size of the open window."""
        *other_terms, last_code = self.terms.tolist()
        code = kit.code_of(size)
        if code != last_code:
            write_numbers(self.terms, [*other_terms, code])

    def open_size(self) -> Schedule:
        *_, code = self.terms.tolist()
        return UntilWeight(-code) if code < 0 else code

    def result(self) -> StepResult:
        *flags, grad_norm = self.last_event.tolist()
        state = self.pull()
        applied, skipped, overflow = (flag == state.micro_step + 1 for flag in flags)
        return StepResult(
            applied,
            skipped,
            overflow,
            grad_norm,
            state.loss_scale,
            state.micro_step,
            state.optimizer_step,
            self.window_loss.value,
        )
