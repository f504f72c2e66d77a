"""The options of an accumulation, validated once, here, for every backend."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, cast

from gradaccum._validation import require_bool, require_choice, require_number
from gradaccum.loss_scale import LossScale, Scaler, ScalerByAttributes, ScaleRule, scale_rule
from gradaccum.schedule import Schedule, make_schedule

Reduction = Literal["mean", "sum", "item_mean"]
OnOverflow = Literal["skip_window", "drop_micro_batch"]

REDUCTIONS = ("mean", "sum", "item_mean")
ON_OVERFLOW = ("skip_window", "drop_micro_batch")


class Options(NamedTuple):
    """What `gradaccum.wrap` was told, checked. Constants of the program: transitions may branch on them."""

    steps: Schedule
    """Micro-batches per window; None: the caller closes every window."""
    reduction: Reduction
    clip_norm: float | None
    skip_norm: float | None
    accumulate_dtype: Any
    """The framework's own dtype or its name; None: float32 for half-precision gradients, else the gradient's own."""
    scale_rule: ScaleRule
    on_overflow: OnOverflow
    master_weights: bool = False
    """Keep float32 masters of half-precision parameters; the inner optimizer works on those."""
    scaler: Scaler | ScalerByAttributes | None = None
    """The framework's own scaler, if that was given as the loss scale: the backend drives it, or refuses it."""


def make_options(
    steps: Any,
    *,
    reduction: str = "mean",
    clip_norm: float | None = None,
    skip_norm: float | None = None,
    accumulate_dtype: Any = None,
    loss_scale: float | LossScale | None = None,
    on_overflow: str = "skip_window",
    master_weights: bool = False,
) -> Options:
    """Check the options of `gradaccum.wrap` and put them in the form the transitions read.

    Raises:
        ArgumentTypeError, ArgumentValueError: naming the argument that is wrong.
    """
    return Options(
        steps=make_schedule(steps),
        reduction=cast(Reduction, require_choice("reduction", reduction, REDUCTIONS)),
        clip_norm=None if clip_norm is None else require_number("clip_norm", clip_norm, above=0),
        skip_norm=None if skip_norm is None else require_number("skip_norm", skip_norm, above=0),
        accumulate_dtype=accumulate_dtype,
        scale_rule=scale_rule(loss_scale),
        on_overflow=cast(OnOverflow, require_choice("on_overflow", on_overflow, ON_OVERFLOW)),
        master_weights=require_bool("master_weights", master_weights),
        scaler=loss_scale if isinstance(loss_scale, (Scaler, ScalerByAttributes)) else None,
    )
