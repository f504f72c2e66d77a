"""The second door: what a backend is made of. `gradaccum` itself has what users need, the classes of the errors among it.

- `accumulate`, `usable`, `contribution`, `ends`, `decide`, `close`, `discard`: the transitions of the `State`, by `Options`;
- `add_loss`, `window_loss`, `is_first`, `first_seen`, `window_seen`, `noise_scale`: what a window knows besides its gradient;
- `terms_of`, `resumed`, `redistributed`: what an open window depends on, and how a saved one goes on;
- `make_division`, `divided`, `leaves_of`, `share`: where a large batch is cut, the nests that it comes in, how other outputs merge;
- `explain` and the ``require_`` and ``_error`` functions: one mistake has one class and one wording in every backend;
- `Listeners`: who hears of closed windows; `described`, `status`: the state in one line;
- `comparable`, `linearity_report`: whether a loss can be scaled;
- `examine`, `Subject`, `Conditions`, `Run`: what `gradaccum.verify` runs, and how;
- `Backend`, `GatingBackend`, `VerifyingBackend`, `DeviceBackend`, `ScalerDriver`: what the core asks for in return.
"""

from gradaccum._validation import require_bool, require_weight
from gradaccum.auto_size import free_frames, require_micro_batch_size, too_small_error, unknown_limit_error
from gradaccum.class_shards import require_classes, require_loss_options, require_shard_sizes
from gradaccum.errors import explain
from gradaccum.linearity import ROUNDINGS, SCALES, comparable, linearity_report, relative_error
from gradaccum.loss_scale import ScalerDriver, ScaleRule
from gradaccum.merging import KINDS, MergingOps, concatenate_error, finished, kinds_of, merged, require_kind, share
from gradaccum.nests import ITEMS, Leaf, Nest, children_of, is_column, leaves_of, mapped, mark_lists, spread, with_leaves
from gradaccum.noise_scale import (
    Noise,
    NoiseFields,
    first_seen,
    forget_window,
    is_first,
    joined_noise,
    no_noise,
    noise_scale,
    noise_shares,
    window_seen,
)
from gradaccum.options import Options, Reduction, make_options, require_reduction
from gradaccum.refusals import (
    accumulate_dtype_error,
    half_made_error,
    missing_worker_error,
    optimizer_error,
    rate_bits,
    require_same_rates,
    shared_until_weight_error,
    torn_window_error,
    update_due_error,
    wrapped_twice_error,
)
from gradaccum.registry import Backend, DeviceBackend, GatingBackend
from gradaccum.resuming import Terms, code_of, decode_terms, encode_terms, redistributed, resumed, terms_of
from gradaccum.schedule import Schedule, UntilWeight, is_known, require_steps
from gradaccum.segments import segment_cuts
from gradaccum.splitting import (
    Cut,
    Division,
    aux_shape_error,
    cuts,
    divided,
    item_weights_error,
    make_division,
    packed,
    require_item_weights,
    require_items,
    require_one_size,
    scalar_loss_error,
)
from gradaccum.state import FIELD_DTYPES, Scalar, State, at_rest, has_exact_inverse, initial_state, largest_number
from gradaccum.status import described, status
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
)
from gradaccum.verification import ROUNDING_LIMIT, Column, Conditions, Layer, Precision, Run, Subject, VerifyingBackend, examine, item_axis
from gradaccum.watching.listeners import Handle, Listeners
from gradaccum.watching.window import Listener
from gradaccum.window_loss import add_loss, window_loss

__all__ = [
    "FIELD_DTYPES",
    "ITEMS",
    "KINDS",
    "ROUNDINGS",
    "ROUNDING_LIMIT",
    "SCALES",
    "Backend",
    "Column",
    "Conditions",
    "Cut",
    "Decision",
    "DeviceBackend",
    "Division",
    "Fields",
    "GatingBackend",
    "Handle",
    "Layer",
    "Leaf",
    "Listener",
    "Listeners",
    "MergingOps",
    "Nest",
    "Noise",
    "NoiseFields",
    "Options",
    "Precision",
    "Reduction",
    "Run",
    "Scalar",
    "ScaleRule",
    "ScalerDriver",
    "Schedule",
    "State",
    "Subject",
    "Terms",
    "UntilWeight",
    "VerifyingBackend",
    "Where",
    "accumulate",
    "accumulate_dtype_error",
    "add_loss",
    "at_rest",
    "aux_shape_error",
    "children_of",
    "close",
    "code_of",
    "comparable",
    "concatenate_error",
    "contribution",
    "cuts",
    "decide",
    "decode_terms",
    "described",
    "discard",
    "divided",
    "divisor",
    "encode_terms",
    "ends",
    "examine",
    "explain",
    "finished",
    "first_seen",
    "forget_window",
    "free_frames",
    "half_made_error",
    "has_exact_inverse",
    "initial_state",
    "is_column",
    "is_first",
    "is_known",
    "item_axis",
    "item_weights_error",
    "joined",
    "joined_noise",
    "kinds_of",
    "largest_number",
    "leaves_of",
    "linearity_report",
    "make_division",
    "make_options",
    "mapped",
    "mark_lists",
    "measures",
    "merged",
    "missing_worker_error",
    "no_noise",
    "noise_scale",
    "noise_shares",
    "optimizer_error",
    "packed",
    "rate_bits",
    "redistributed",
    "relative_error",
    "require_bool",
    "require_classes",
    "require_item_weights",
    "require_items",
    "require_kind",
    "require_loss_options",
    "require_micro_batch_size",
    "require_one_size",
    "require_reduction",
    "require_same_rates",
    "require_shard_sizes",
    "require_steps",
    "require_weight",
    "resumed",
    "scalar_loss_error",
    "segment_cuts",
    "select",
    "share",
    "shared_until_weight_error",
    "spread",
    "status",
    "steps_at",
    "terms_of",
    "too_small_error",
    "torn_window_error",
    "unknown_limit_error",
    "update_due_error",
    "usable",
    "window_loss",
    "window_seen",
    "with_leaves",
    "wrapped_twice_error",
]
