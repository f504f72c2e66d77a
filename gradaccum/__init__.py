"""Gradient accumulation that means the same thing, exactly, in PyTorch, JAX/optax and MindSpore.

`wrap` is all that most users need. The rest is for those who read results, catch errors or write a backend. Importing this
package imports the standard library only.
"""

from gradaccum._validation import require_weight
from gradaccum.errors import (
    ArgumentTypeError,
    ArgumentValueError,
    BackendNotFoundError,
    CheckpointError,
    GradAccumError,
    GradientError,
    UsageError,
    explain,
)
from gradaccum.loss_scale import DynamicLossScale, LossScale, Scaler, ScaleRule, StaticLossScale
from gradaccum.options import Options, make_options
from gradaccum.refusals import accumulate_dtype_error, foreign_scaler_error, optimizer_error, wrapped_twice_error
from gradaccum.registry import Backend, available_backends, load_backend, registered_backends
from gradaccum.result import StepResult
from gradaccum.resuming import Terms, decode_terms, encode_terms, resumed, terms_of
from gradaccum.scaling_report import SCALES, ScalingReport, scaling_report
from gradaccum.schedule import require_steps, steps_at
from gradaccum.state import FIELD_DTYPES, State, at_rest, initial_state, largest_number
from gradaccum.transitions import Decision, Fields, Where, accumulate, close, contribution, decide, discard, is_full, select
from gradaccum.wrapping import wrap

__version__ = "0.1.0"

__all__ = [
    "FIELD_DTYPES",
    "SCALES",
    "ArgumentTypeError",
    "ArgumentValueError",
    "Backend",
    "BackendNotFoundError",
    "CheckpointError",
    "Decision",
    "DynamicLossScale",
    "Fields",
    "GradAccumError",
    "GradientError",
    "LossScale",
    "Options",
    "ScaleRule",
    "Scaler",
    "ScalingReport",
    "State",
    "StaticLossScale",
    "StepResult",
    "Terms",
    "UsageError",
    "Where",
    "accumulate",
    "accumulate_dtype_error",
    "at_rest",
    "available_backends",
    "close",
    "contribution",
    "decide",
    "decode_terms",
    "discard",
    "encode_terms",
    "explain",
    "foreign_scaler_error",
    "initial_state",
    "is_full",
    "largest_number",
    "load_backend",
    "make_options",
    "optimizer_error",
    "registered_backends",
    "require_steps",
    "require_weight",
    "resumed",
    "scaling_report",
    "select",
    "steps_at",
    "terms_of",
    "wrap",
    "wrapped_twice_error",
]
