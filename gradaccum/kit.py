"""The second door: what a backend is made of. `gradaccum` itself has what users need, the classes of the errors among it.

- `accumulate`, `usable`, `contribution`, `ends`, `decide`, `close`, `discard`: the transitions of the `State`, by `Options`;
- `terms_of`, `resumed`, `redistributed`: what an open window depends on, and how a saved one goes on;
- `explain` and the ``require_`` and ``_error`` functions: one mistake has one class and one wording in every backend;
- `comparable`, `linearity_report`: whether a loss can be scaled;
- `Backend`, `GatingBackend`, `ScalerDriver`: what the core asks for in return.
"""

from gradaccum._validation import require_weight
from gradaccum.class_shards import require_classes, require_loss_options, require_shard_sizes
from gradaccum.errors import explain
from gradaccum.linearity import ROUNDINGS, SCALES, comparable, linearity_report, relative_error
from gradaccum.loss_scale import ScalerDriver, ScaleRule
from gradaccum.options import Options, make_options
from gradaccum.refusals import (
    accumulate_dtype_error,
    missing_worker_error,
    optimizer_error,
    torn_window_error,
    update_due_error,
    wrapped_twice_error,
)
from gradaccum.registry import Backend, GatingBackend
from gradaccum.resuming import Terms, decode_terms, encode_terms, redistributed, resumed, terms_of
from gradaccum.schedule import Schedule, require_steps
from gradaccum.state import FIELD_DTYPES, Scalar, State, at_rest, initial_state, largest_number
from gradaccum.transitions import (
    Decision,
    Fields,
    Where,
    accumulate,
    close,
    contribution,
    decide,
    discard,
    divisor,
    ends,
    joined,
    select,
    steps_at,
    usable,
)

__all__ = [
    "FIELD_DTYPES",
    "ROUNDINGS",
    "SCALES",
    "Backend",
    "Decision",
    "Fields",
    "GatingBackend",
    "Options",
    "Scalar",
    "ScaleRule",
    "ScalerDriver",
    "Schedule",
    "State",
    "Terms",
    "Where",
    "accumulate",
    "accumulate_dtype_error",
    "at_rest",
    "close",
    "comparable",
    "contribution",
    "decide",
    "decode_terms",
    "discard",
    "divisor",
    "encode_terms",
    "ends",
    "explain",
    "initial_state",
    "joined",
    "largest_number",
    "linearity_report",
    "make_options",
    "missing_worker_error",
    "optimizer_error",
    "redistributed",
    "relative_error",
    "require_classes",
    "require_loss_options",
    "require_shard_sizes",
    "require_steps",
    "require_weight",
    "resumed",
    "select",
    "steps_at",
    "terms_of",
    "torn_window_error",
    "update_due_error",
    "usable",
    "wrapped_twice_error",
]
