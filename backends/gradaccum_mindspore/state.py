"""The storage of an accumulation: a `mindspore.Parameter` per field of the state, a sum
per parameter of the model, the window's size.

PyNative code, compiled functions and checkpoints all see Parameters. Their names follow
from the names of the model's parameters and the ``name=`` option alone, so a resumed
run finds them in another process. ``grad_sum`` is a suffix, because
`mindspore.load_param_into_net` would load a Parameter called ``grad_sum.weight`` into a
missing ``weight``. A sum is zero unless ``micro_step > 0``.

If a function of the user's gives the size of a window, Python code calls it with an
int, compiled code with an int32 Tensor. A wrong value raises outside compiled code, and
inside if it is a constant. A Tensor below 1 in compiled code makes the window an
overflow.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, SupportsFloat

import mindspore as ms
import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops
from mindspore.ops import constexpr

from gradaccum import ArgumentTypeError, ArgumentValueError, StepResult, kit
from gradaccum.kit import (
    FIELD_DTYPES,
    Fields,
    Options,
    ScaleRule,
    Schedule,
    State,
    Terms,
    UntilWeight,
    explain,
)
from gradaccum_mindspore.extensions import Knowledge, Listening
from gradaccum_mindspore.grad_scaler import NEVER, drive, key_of
from gradaccum_mindspore.gradient_sum import (
    HALF,
    DType,
    Sums,
    hidden_parameter,
    narrows,
    sum_dtype,
)
from gradaccum_mindspore.master_weights import Masters
from gradaccum_mindspore.window.open_window import OpenWindowWarning

Sizes = int | tuple[tuple[int, int], ...] | Callable[[Any], Any]
Saved = Mapping[str, Parameter | Tensor]
"""A checkpoint as `mindspore.load_checkpoint` returns it."""


INTEGERS = ("Int8", "Int16", "Int32", "Int64", "UInt8", "UInt16", "UInt32", "UInt64")


def window_size(steps: Schedule, optimizer_step: int) -> Schedule:
    """Return the size of the window after update `optimizer_step`: an int, an
    `UntilWeight` of one, or None.
    """
    if kit.is_known(steps):
        size: Schedule = kit.steps_at(steps, optimizer_step, kit.select)
        return size
    function: Any = sizes_of(steps)
    try:
        given = function(optimizer_step)
    except Exception:
        # It may consist of operators that take Tensors only, for compiled code.
        given = function(Tensor(optimizer_step, ms.int32))
    number = given.item() if isinstance(given, Tensor) else given
    return kit.require_steps(
        UntilWeight(number) if isinstance(steps, UntilWeight) else number,
        optimizer_step,
        steps,
    )


def sizes_of(steps: Schedule) -> Sizes | None:
    return steps.weight if isinstance(steps, UntilWeight) else steps


def size_of_code(code: int) -> Schedule:
    return UntilWeight(-code) if code < 0 else code


def with_known_size(options: Options, optimizer_step: int) -> Options:
    return options._replace(steps=window_size(options.steps, optimizer_step))


@constexpr  # type: ignore[untyped-decorator]
def check_constant_size(size: int | None, until_weight: bool) -> None:
    """Check the constant that a function returned while MindSpore compiled it; None
    stands for no constant.
    """
    if size is not None:
        asked, schedule = (
            (UntilWeight(size), UntilWeight(1)) if until_weight else (size, 1)
        )
        kit.require_steps(asked, 0, schedule)


@constexpr  # type: ignore[untyped-decorator]
def check_size_dtype(dtype: DType, until_weight: bool) -> None:
    if str(dtype) not in INTEGERS:
        argument, what = (
            ("until_weight(...)", "weight")
            if until_weight
            else ("steps", "number of micro-batches")
        )
        found, fix = (
            f"a Tensor of {dtype}",
            f"Return the {what} of that window, rounded: optimizer_step // 2 + 1.",
        )
        raise explain(
            ArgumentTypeError,
            f"{argument}(optimizer_step)",
            expected="an int >= 1",
            found=found,
            fix=fix,
        )


DTYPES = {
    "int32": ms.int32,
    "float32": ms.float32,
    "float64": ms.float64,
    "bool": ms.bool_,
}
PACKAGE = "gradaccum"
SHARED = "workers"
NUMPY_DTYPES = {dtype: np.dtype(name) for name, dtype in DTYPES.items()}

GRAD_NORM = 3
STEPS = 1 + Terms._fields.index("steps")  # after the format
"""Position of the open window's size in `Storage.terms`."""
WEIGHT_FIX = (
    "pass their number as weight=, with each, as gradaccum_mindspore.TrainOneStepCell"
    " does"
)
OWN, OF_ALL, TORN = range(3)
"""The open window's sum: this worker's; of all workers, until their update is made;
neither, as the reduction failed.
"""


class Storage(nn.Cell):  # type: ignore[misc]
    """The Parameters of one accumulation."""

    shards: Sums
    whole: Sums

    def __init__(
        self,
        parameters: Sequence[Parameter],
        options: Options,
        name: str,
        inner_scale: float = 1.0,
        place: tuple[int, int] | None = None,
        sharded: tuple[int, ...] = (),
    ) -> None:
        super().__init__(auto_prefix=False)
        dtypes = [
            sum_dtype(parameter.dtype, options.accumulate_dtype)
            for parameter in parameters
        ]
        self.float_dtype = ms.float64 if ms.float64 in dtypes else ms.float32
        """dtype of `weight` and of norms."""
        self.largest = kit.largest_number(float64_weight=self.float_dtype == ms.float64)
        # A Cell would list them as its own.
        object.__setattr__(self, "model", tuple(parameters))
        self.specs = tuple(
            (parameter.name, tuple(parameter.shape), parameter.dtype)
            for parameter in parameters
        )
        self.handed = tuple(
            ms.float32 if options.master_weights and p.dtype in HALF else p.dtype
            for p in parameters
        )
        """dtype of each gradient as the inner optimizer gets it."""
        self.narrowed = tuple(
            i
            for i, pair in enumerate(zip(dtypes, self.handed, strict=True))
            if narrows(*pair)
        )
        """Positions of the sums that can be finite while their gradient in the inner
        optimizer's dtype is not.
        """
        self.options = options
        self.varies = not isinstance(sizes_of(options.steps), int | None)
        self.inner_scale = inner_scale
        self.unscaled = options.scale_rule == ScaleRule()
        """True if the loss scale is 1 for good."""
        self.scaled = key_of(options) if inner_scale == 1 else NEVER
        """A constant by which compiled code asks whether anyone read the loss scale;
        MindSpore's own pair need not.
        """
        prefix = state_prefix(name)
        self.suffix, master_suffix = suffixes(prefix)
        self.masters = Masters(
            parameters if options.master_weights else (), master_suffix
        )
        self.sums = ParameterTuple(
            [
                hidden_parameter(
                    ops.zeros(parameter.shape, dtype), parameter.name + self.suffix
                )
                for parameter, dtype in zip(parameters, dtypes, strict=True)
            ]
        )
        self.sharded = sharded
        """Positions of the sums that each worker has for itself."""
        # A Cell would list them as its own once more.
        object.__setattr__(
            self, "shards", tuple(self.sums[position] for position in sharded)
        )
        object.__setattr__(
            self,
            "whole",
            tuple(
                total
                for position, total in enumerate(self.sums)
                if position not in sharded
            ),
        )
        codes = kit.encode_terms(self.terms_after(0))
        require_free_names(prefix, parameters)
        for field, entry in self.first_state(options, prefix).items():
            setattr(self, field, entry)
        self.terms = hidden_parameter(Tensor(codes, ms.int32), f"{prefix}.terms")
        """The options that the open window depends on, for a checkpoint:
        `gradaccum.kit.encode_terms`.
        """
        self.last_event = hidden_parameter(
            Tensor([0.0, 0.0, 0.0, 0.0], self.float_dtype), f"{prefix}.last_event"
        )
        """(applied, skipped, overflow, grad_norm) of a `StepResult`. A flag counts only
        while flag == micro_step + 1: it expires at the next micro-batch without a
        write.
        """
        self.knowledge = Knowledge(prefix, options, self.float_dtype)
        self.listening = Listening(self)
        self.sizes = kit.Sizes(options.reduction, WEIGHT_FIX)
        self.open_window = OpenWindowWarning(self)
        self.half_made = False
        """True while nothing has been loaded since the inner optimizer raised."""
        self.several, self.place = place is not None, place or (0, 1)
        self.prefix = prefix
        if place is not None:
            self.shared = hidden_parameter(
                Tensor([OWN, *place], ms.int32), f"{prefix}.{SHARED}"
            )
            """Whose sum it is (`OWN`, `OF_ALL`, `TORN`), this worker's rank, and the
            number of workers, for a checkpoint too.
            """

    def names(self) -> tuple[str, ...]:
        """Return the parameters' names now: a Cell that holds the model may have
        renamed them since.
        """
        return tuple(parameter.name for parameter in self.model)

    def first_state(self, options: Options, prefix: str) -> dict[str, Parameter]:
        """Return a Parameter per field. A `mindspore.amp.DynamicLossScaler`'s own two
        stand for scale and tracker, renamed.
        """
        start = kit.initial_state(options.scale_rule.init_scale)._asdict()
        fields = {
            field: hidden_parameter(
                Tensor(value, self.field_dtype(field)), f"{prefix}.{field}"
            )
            for field, value in start.items()
        }
        scaler = options.scaler
        if scaler is not None:
            drive(scaler, self.scaled)
            for field, entry in (
                ("loss_scale", scaler.scale_value),
                ("growth_tracker", scaler.counter),
            ):
                entry.name, entry.requires_grad = fields[field].name, False
                fields[field] = entry
        return fields

    def field_dtype(self, field: str) -> DType:
        return self.float_dtype if field == "weight" else DTYPES[FIELD_DTYPES[field]]

    def terms_after(self, optimizer_step: int) -> Terms:
        return kit.terms_of(
            with_known_size(self.options, optimizer_step), optimizer_step
        )

    def push_size(self, code: int) -> None:
        *others, before = self.terms.tolist()
        if code != before:
            self._assign(self.terms, [*others, code])

    def open_size(self) -> Schedule:
        *_, code = self.terms.tolist()
        return size_of_code(code)

    def held(self) -> int:
        """Whose the open window's sum is: `OWN`, `OF_ALL` or `TORN`."""
        held: int = self.shared.tolist()[0]
        return held

    def hold(self, held: int) -> None:
        if self.held() != held:
            self._assign(self.shared, [held, *self.place])

    def pull(self) -> State:
        return State(*(getattr(self, field).item() for field in FIELD_DTYPES))

    def push(self, state: Fields, before: State) -> State:
        """Write where a state of Python numbers differs from `before`, the last one
        pulled or pushed.
        """
        rounded = kit.at_rest(
            State(*state), float64_weight=self.float_dtype == ms.float64
        )
        for field, old, new in zip(FIELD_DTYPES, before, rounded, strict=True):
            if new != old:
                self._assign(getattr(self, field), new)
        return rounded

    def push_event(
        self,
        applied: bool,
        skipped: bool,
        overflow: bool,
        grad_norm: float | None = None,
        *,
        micro_step: int = 0,
    ) -> None:
        """Write what the next `StepResult` will say; without `grad_norm` the last norm
        stays.
        """
        *_, last_norm = before = self.last_event.tolist()
        flags = [
            float(flag * (micro_step + 1)) for flag in (applied, skipped, overflow)
        ]
        new = [*flags, last_norm if grad_norm is None else grad_norm]
        if new != before:
            self._assign(self.last_event, new)

    def put_event_back(self, last_event: Sequence[float]) -> None:
        """Undo what was written to `last_event` since it had this value."""
        self._assign(self.last_event, last_event)

    def _assign(
        self, parameter: Parameter, value: SupportsFloat | Sequence[float]
    ) -> None:
        # Not Tensor(value, dtype), which takes ten times as long.
        ops.assign(
            parameter, Tensor.from_numpy(np.array(value, NUMPY_DTYPES[parameter.dtype]))
        )

    def result(self) -> StepResult:
        *flags, grad_norm = self.last_event.tolist()
        state = self.pull()
        applied, skipped, overflow = (flag == state.micro_step + 1 for flag in flags)
        counted = (state.loss_scale, state.micro_step, state.optimizer_step)
        return StepResult(
            applied,
            skipped,
            overflow,
            grad_norm,
            *counted,
            self.knowledge.last_loss(),
        )


def state_prefix(name: str) -> str:
    """Return the start of the state's names; no layer's name starts so."""
    return name if name == PACKAGE else f"{name}.{PACKAGE}"


def prefixes_in(saved: Saved) -> tuple[str, ...]:
    found = (
        name.removesuffix(".micro_step")
        for name in saved
        if name.endswith(".micro_step")
    )
    return tuple(
        prefix
        for prefix in found
        if all(
            f"{prefix}.{field}" in saved
            for field in (*FIELD_DTYPES, "terms", "last_event")
        )
    )


def suffixes(prefix: str) -> tuple[str, str]:
    name = prefix if prefix == PACKAGE else prefix.removesuffix(f".{PACKAGE}")
    return f".{name}.grad_sum", f".{name}.master"


def require_free_names(prefix: str, parameters: Sequence[Parameter]) -> None:
    """Raise unless no Parameter of the model has a name of the state's: a checkpoint
    would hold one of the two.
    """
    taken = [
        parameter.name
        for parameter in parameters
        if parameter.name.rpartition(".")[0] == prefix
    ]
    if taken:
        expected, found = (
            f"a name such that no parameter of the model is called {prefix}.*",
            f"a model with {taken}",
        )
        raise explain(
            ArgumentValueError,
            "name",
            expected=expected,
            found=found,
            fix="Write for example name='accumulation'.",
        )
