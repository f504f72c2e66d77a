"""Where an accumulation lives: one `mindspore.Parameter` per field of the state and one sum per model parameter.

Parameters, because only they are seen alike by PyNative code, compiled functions and checkpoints. Their names follow from the model's
parameter names and the ``name=`` option alone: a resumed run finds them by name in another process. ``grad_sum`` is a suffix, because
`mindspore.load_param_into_net` would load a Parameter called ``grad_sum.weight`` into a missing ``weight``.

A sum is zero unless ``micro_step > 0``: the end of a window assigns exact zeros, which an inf or NaN does not survive.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops

from gradaccum import ArgumentValueError, StepResult
from gradaccum.kit import FIELD_DTYPES, Options, Terms, at_rest, encode_terms, explain, initial_state, largest_number, terms_of
from gradaccum.kit import State as NeutralState
from gradaccum_mindspore.checks import HALF, accumulate_dtype, reaches_beyond
from gradaccum_mindspore.driven_scaler import drive
from gradaccum_mindspore.masters import Masters
from gradaccum_mindspore.scaled import NEVER, key_of
from gradaccum_mindspore.sizes import with_known_size

DTYPES = {"int32": ms.int32, "float32": ms.float32, "float64": ms.float64, "bool": ms.bool_}
PACKAGE = "gradaccum"
NUMPY_DTYPES = {dtype: np.dtype(name) for name, dtype in DTYPES.items()}


class Storage(nn.Cell):  # type: ignore[misc]
    """The Parameters of one accumulation.

    Args:
        parameters: the model's parameters, in the order of the gradients.
        options: the checked options.
        name: tells two accumulations in one program apart; part of every Parameter's name.
        inner_scale: a part of the loss scale that the inner optimizer divides by itself.
    """

    def __init__(self, parameters: Sequence[Any], options: Options, name: str, inner_scale: float = 1.0) -> None:
        super().__init__(auto_prefix=False)
        dtypes = [accumulate_dtype(parameter.dtype, options.accumulate_dtype) for parameter in parameters]
        self.float_dtype = ms.float64 if ms.float64 in dtypes else ms.float32
        """dtype of `weight` and of norms."""
        self.largest = largest_number(float64_weight=self.float_dtype == ms.float64)
        object.__setattr__(self, "model", tuple(parameters))  # A Cell would list them as its own.
        self.specs = tuple((parameter.name, tuple(parameter.shape), parameter.dtype) for parameter in parameters)
        self.handed = tuple(ms.float32 if options.master_weights and p.dtype in HALF else p.dtype for p in parameters)
        """dtype of each gradient as the inner optimizer gets it."""
        self.narrowed = tuple(i for i, pair in enumerate(zip(dtypes, self.handed, strict=True)) if reaches_beyond(*pair))
        """Positions of the sums that can be finite while the gradient handed over is not."""
        self.options = options
        self.varies = options.steps is not None and not isinstance(options.steps, int)
        """Whether windows have different sizes."""
        self.inner_scale = inner_scale
        self.scaled = key_of(options) if inner_scale == 1 else NEVER
        """Constant by which compiled code asks whether the loss scale was ever read; MindSpore's own pair need not read it."""
        self.suffix = f".{name}.grad_sum"
        self.masters = Masters(parameters if options.master_weights else (), f".{name}.master")
        self.sums = ParameterTuple(
            [
                hidden_parameter(ops.zeros(parameter.shape, dtype), parameter.name + self.suffix)
                for parameter, dtype in zip(parameters, dtypes, strict=True)
            ]
        )
        codes = encode_terms(self.terms_after(0))
        prefix = state_prefix(name)
        require_free_names(prefix, parameters)
        for field, entry in self.first_state(options, prefix).items():
            setattr(self, field, entry)
        self.terms = hidden_parameter(Tensor(codes, ms.int32), f"{prefix}.terms")
        """What the open window depends on beside its state, for a checkpoint: `gradaccum.kit.encode_terms`."""
        self.last_event = hidden_parameter(Tensor([0.0, 0.0, 0.0, 0.0], self.float_dtype), f"{prefix}.last_event")
        """(applied, skipped, overflow, grad_norm) of a `StepResult`; a flag that is up is 1 + the `micro_step` that it belongs to, so that
        an ordinary micro-batch need not take it down."""

    def names(self) -> tuple[str, ...]:
        """The parameters' names as they are now: a Cell that holds the model may have renamed them since this was made."""
        return tuple(parameter.name for parameter in self.model)

    def first_state(self, options: Options, prefix: str) -> dict[str, Any]:
        """A Parameter per field; those of a `mindspore.amp.DynamicLossScaler`, which is driven then, are its own, renamed."""
        start = initial_state(options.scale_rule.init_scale)._asdict()
        fields = {field: hidden_parameter(Tensor(value, self.field_dtype(field)), f"{prefix}.{field}") for field, value in start.items()}
        scaler = options.scaler
        if scaler is not None:
            drive(scaler, self.scaled)
            for field, entry in (("loss_scale", scaler.scale_value), ("growth_tracker", scaler.counter)):
                entry.name, entry.requires_grad = fields[field].name, False
                fields[field] = entry
        return fields

    def field_dtype(self, field: str) -> Any:
        """The dtype of a field of the state at rest."""
        return self.float_dtype if field == "weight" else DTYPES[FIELD_DTYPES[field]]

    def entries(self) -> list[Any]:
        """Every Parameter that a checkpoint must hold."""
        return [*(getattr(self, field) for field in FIELD_DTYPES), self.terms, self.last_event, *self.sums]

    def terms_after(self, optimizer_step: int) -> Terms:
        """What the window that follows that update depends on beside its state."""
        return terms_of(with_known_size(self.options, optimizer_step), optimizer_step)

    def push_size(self, size: int) -> None:
        """Write the size of the open window into its terms."""
        codes = self.terms.tolist()
        if codes[-1] != size:
            self._assign(self.terms, [*codes[:-1], size])

    def pull(self) -> NeutralState:
        """The state in Python numbers."""
        return NeutralState(*(getattr(self, field).item() for field in FIELD_DTYPES))

    def push(self, state: Any, before: NeutralState) -> NeutralState:
        """Write a state of Python numbers over the one that was pulled or pushed last; only what changed is written."""
        rounded = at_rest(NeutralState(*state), float64_weight=self.float_dtype == ms.float64)
        for field, old, new in zip(FIELD_DTYPES, before, rounded, strict=True):
            if new != old:
                self._assign(getattr(self, field), new)
        return rounded

    def push_event(self, applied: bool, skipped: bool, overflow: bool, grad_norm: float | None = None, *, micro_step: int = 0) -> None:
        """Write what a `StepResult` will say of this event; without `grad_norm` the last one stays."""
        old = self.last_event.tolist()
        flags = [float(flag * (micro_step + 1)) for flag in (applied, skipped, overflow)]
        new = [*flags, old[3] if grad_norm is None else grad_norm]
        if new != old:
            self._assign(self.last_event, new)

    def _assign(self, parameter: Any, value: Any) -> None:
        # Not Tensor(value, dtype), which takes ten times as long.
        ops.assign(parameter, Tensor.from_numpy(np.array(value, NUMPY_DTYPES[parameter.dtype])))

    def result(self) -> StepResult:
        """The last event and the state, in Python numbers."""
        *flags, grad_norm = self.last_event.tolist()
        state = self.pull()
        applied, skipped, overflow = (flag == state.micro_step + 1 for flag in flags)
        return StepResult(applied, skipped, overflow, grad_norm, state.loss_scale, state.micro_step, state.optimizer_step)


def state_prefix(name: str) -> str:
    """What the state's names begin with, which those of no layer do."""
    return name if name == PACKAGE else f"{name}.{PACKAGE}"


def require_free_names(prefix: str, parameters: Sequence[Any]) -> None:
    """Raise `ArgumentValueError` if the model has a Parameter of a name of the state's: a checkpoint would hold one of the two."""
    taken = [parameter.name for parameter in parameters if parameter.name.rpartition(".")[0] == prefix]
    if taken:
        expected, found = f"a name such that no parameter of the model is called {prefix}.*", f"a model with {taken}"
        raise explain(ArgumentValueError, "name", expected=expected, found=found, fix="Write for example name='accumulation'.")


def hidden_parameter(value: Any, name: str) -> Any:
    """A Parameter that is saved with the model and never trained."""
    return Parameter(value, name=name, requires_grad=False)
