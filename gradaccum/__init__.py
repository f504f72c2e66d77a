"""Exact gradient accumulation, with the same semantics in PyTorch, JAX/optax and
MindSpore.

Most users need only `wrap`. The building blocks for backend authors are in
`gradaccum.kit`. Importing this package imports only the standard library.
"""

from gradaccum.errors import (
    ArgumentTypeError,
    ArgumentValueError,
    BackendNotFoundError,
    CheckpointError,
    GradAccumError,
    GradAccumWarning,
    GradientError,
    UsageError,
)
from gradaccum.loop_check import (
    LoopProblem,
    LoopReport,
    assert_accumulates,
    check_loop,
    recording,
)
from gradaccum.options import DynamicLossScale, LossScale, until_weight
from gradaccum.registry import available_backends, load_backend, registered_backends
from gradaccum.splitting import AutoMicroBatchSize
from gradaccum.state import StepResult
from gradaccum.statistics import effective_batch_size, scaled_learning_rate
from gradaccum.verification.causes import Cause
from gradaccum.verification.frameworks import verify
from gradaccum.verification.report import VerificationReport
from gradaccum.window_loop import Window, Windows, updates_in, windows
from gradaccum.wrapping import wrap

__version__ = "0.1.0"

__all__ = [
    "ArgumentTypeError",
    "ArgumentValueError",
    "AutoMicroBatchSize",
    "BackendNotFoundError",
    "Cause",
    "CheckpointError",
    "DynamicLossScale",
    "GradAccumError",
    "GradAccumWarning",
    "GradientError",
    "LoopProblem",
    "LoopReport",
    "LossScale",
    "StepResult",
    "UsageError",
    "VerificationReport",
    "Window",
    "Windows",
    "assert_accumulates",
    "available_backends",
    "check_loop",
    "effective_batch_size",
    "load_backend",
    "recording",
    "registered_backends",
    "scaled_learning_rate",
    "until_weight",
    "updates_in",
    "verify",
    "windows",
    "wrap",
]
