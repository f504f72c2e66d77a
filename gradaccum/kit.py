"""The parts of a backend. `gradaccum` itself has what users need, the error classes
included.

- `accumulate`, `usable`, `contribution`, `ends`, `with_denominator`, `decide`, `close`,
  `discard`: transitions of the `State`;
- `add_loss`, `window_loss`: a window's loss;
- `terms_of`, `resumed`, `redistributed`: saving and resuming an open window;
- `epoch`, `Epoch`, `Sizes`: a pass over a loader;
- `make_division`, `divided`, `leaves_of`: cutting a large batch;
- `explain`, ``require_...`` and ``..._error``: one wording for each mistake in every
  backend;
- `Listeners`: callbacks for closed windows, no call while its ``added`` is empty;
  `described`, `status`: the state in one line;
- `examine`, `Subject`, `Conditions`, `Run`: the experiments of `gradaccum.verify`;
- `Backend`, `GatingBackend`, `VerifyingBackend`, `ScalerDriver`: a
  backend's protocols;
- `Steps`, `WrapOptions`, `wrap_with`: a backend's own typed ``wrap``.
"""

from gradaccum.errors import explain, require_bool, require_choice, require_weight
from gradaccum.least_squares import SolvedUpdate, rounding_limit, solve_update
from gradaccum.loop_check import (
    LoopReport,
    as_arguments,
    items_of,
    read_coefficients,
)
from gradaccum.nests import (
    Leaf,
    Nest,
    children_of,
    is_column,
    leaves_of,
    lists_of_one_kind,
    mapped,
    spread,
    with_leaves,
)
from gradaccum.options import (
    Options,
    Reduction,
    ScalerDriver,
    ScaleRule,
    Schedule,
    UntilWeight,
    given_weight,
    is_known,
    make_options,
    require_denominator,
    require_denominator_allowed,
    require_reduction,
    require_steps,
    use_of_weights,
)
from gradaccum.refusals import (
    RATE_MOVED,
    accumulate_dtype_error,
    half_made_error,
    missing_worker_error,
    moving_weight_error,
    optimizer_error,
    rate_bits,
    require_same_rates,
    shared_until_weight_error,
    update_due_error,
    wrapped_twice_error,
)
from gradaccum.registry import (
    Backend,
    GatingBackend,
    Steps,
    WrapOptions,
    wrap_with,
)
from gradaccum.saving import (
    FORMAT,
    Terms,
    code_of,
    decode_terms,
    described,
    encode_terms,
    redistributed,
    require_format,
    resumed,
    status,
    terms_of,
)
from gradaccum.splitting import (
    Cut,
    Division,
    cuts,
    divided,
    free_frames,
    item_weights_error,
    make_division,
    missing_aux_error,
    require_item_weights,
    require_items,
    require_one_size,
    scalar_loss_error,
    too_small_error,
    unknown_limit_error,
)
from gradaccum.state import (
    FIELD_DTYPES,
    Scalar,
    State,
    at_rest,
    has_exact_inverse,
    initial_state,
    largest_number,
    round_to_float32,
)
from gradaccum.statistics import (
    add_loss,
    window_loss,
)
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
    measures,
    select,
    steps_at,
    usable,
    with_denominator,
)
from gradaccum.verification import (
    Batch,
    Conditions,
    HostRandom,
    Precision,
    Run,
    Subject,
    VerifyingBackend,
    as_loss,
    examine,
)
from gradaccum.watching import Handle, Listener, Listeners
from gradaccum.window_loop import Epoch, Sizes, epoch

# The state machine: the transitions of the `State`.
__all__ = [
    "FIELD_DTYPES",
    "Decision",
    "Fields",
    "Scalar",
    "State",
    "Where",
    "accumulate",
    "at_rest",
    "close",
    "contribution",
    "decide",
]
__all__ += [
    "discard",
    "divisor",
    "ends",
    "has_exact_inverse",
    "initial_state",
    "joined",
    "largest_number",
    "measures",
    "select",
]
__all__ += ["round_to_float32", "steps_at", "usable", "with_denominator"]
# A window's loss; callbacks for closed windows; a pass over a loader.
__all__ += [
    "Epoch",
    "Handle",
    "Listener",
    "Listeners",
    "Sizes",
    "add_loss",
    "epoch",
    "window_loss",
]
# Saving and resuming an open window; the state in one line.
__all__ += [
    "FORMAT",
    "Terms",
    "code_of",
    "decode_terms",
    "described",
    "encode_terms",
    "redistributed",
    "require_format",
    "resumed",
]
__all__ += ["status", "terms_of"]
# A large batch: cutting it.
__all__ += [
    "Cut",
    "Division",
    "Leaf",
    "Nest",
    "children_of",
]
__all__ += [
    "cuts",
    "divided",
    "free_frames",
    "is_column",
    "item_weights_error",
    "leaves_of",
    "lists_of_one_kind",
    "make_division",
]
__all__ += [
    "mapped",
    "require_item_weights",
    "require_items",
    "require_one_size",
]
__all__ += [
    "scalar_loss_error",
    "spread",
    "too_small_error",
    "unknown_limit_error",
    "with_leaves",
]
# Options, and a backend's protocols and typed ``wrap``.
__all__ += [
    "Backend",
    "GatingBackend",
    "Options",
    "ScaleRule",
    "ScalerDriver",
    "Schedule",
    "Steps",
    "UntilWeight",
]
__all__ += [
    "WrapOptions",
    "given_weight",
    "is_known",
    "make_options",
    "require_denominator",
    "require_denominator_allowed",
    "use_of_weights",
]
__all__ += ["require_reduction", "require_steps", "wrap_with"]
# One wording for each mistake in every backend.
__all__ += [
    "RATE_MOVED",
    "accumulate_dtype_error",
    "explain",
    "half_made_error",
    "missing_aux_error",
    "missing_worker_error",
    "moving_weight_error",
]
__all__ += [
    "optimizer_error",
    "rate_bits",
    "require_bool",
    "require_choice",
]
__all__ += ["require_same_rates"]
__all__ += [
    "require_weight",
    "shared_until_weight_error",
    "update_due_error",
]
__all__ += ["wrapped_twice_error"]
# The experiments of `gradaccum.verify`.
__all__ += [
    "Batch",
    "Conditions",
    "HostRandom",
    "Precision",
    "Run",
    "Subject",
    "VerifyingBackend",
    "as_loss",
    "examine",
]
# The loop check.
__all__ += [
    "LoopReport",
    "Reduction",
    "SolvedUpdate",
    "as_arguments",
    "items_of",
    "read_coefficients",
    "rounding_limit",
    "solve_update",
]
