"""The options of an accumulation, validated once, here, for every backend."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, cast

from gradaccum._validation import require_bool, require_choice, require_number
from gradaccum.errors import ArgumentValueError, explain
from gradaccum.loss_scale import ScalerDriver, ScaleRule, scale_rule
from gradaccum.schedule import Schedule, make_schedule

Reduction = Literal["mean", "sum", "item_mean"]
OnOverflow = Literal["skip_window", "drop_micro_batch", "ignore"]

REDUCTIONS = ("mean", "sum", "item_mean")
ON_OVERFLOW = ("skip_window", "drop_micro_batch", "ignore")
DECAY = 0.99
"""The default of the noise scale's running means: half of what they hold is from the last 69 windows."""


class Options(NamedTuple):
    """The checked options of `gradaccum.wrap`. They are constants of the program, so the transitions may branch on them."""

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
    scaler: Any = None
    """The framework's own loss scaler, if that was given as the loss scale: the backend drives it."""
    noise_decay: float | None = None
    """The decay of the noise scale's running means; None: it is not measured."""
    separate_sums: bool = False
    """Leave the place where the framework puts gradients to the user. A backend whose parameters hold their gradients sets it."""


def make_options(
    steps: object,
    *,
    reduction: str = "mean",
    clip_norm: float | None = None,
    skip_norm: float | None = None,
    accumulate_dtype: object = None,
    loss_scale: object = None,
    on_overflow: str = "skip_window",
    master_weights: bool = False,
    noise_scale: bool | float = False,
    driver: ScalerDriver | None = None,
) -> Options:
    """Check the options of `gradaccum.wrap` and bring them into the form that the transitions read.

    `driver` is the backend, if it drives loss scalers of its framework.

    Raises:
        ArgumentTypeError, ArgumentValueError: naming the argument that is wrong.
    """
    rule, scaler = scale_rule(loss_scale, driver)
    if on_overflow == "ignore" and rule.backoff_factor != 1:  # A disabled torch.amp.GradScaler passes: its scale is 1.
        fix = "Give a number, or leave on_overflow out."
        expected = 'one that does not move, as on_overflow="ignore" looks for no overflow that it could back off from'
        raise explain(ArgumentValueError, "loss_scale", expected=expected, got=loss_scale, fix=fix)
    return Options(
        steps=make_schedule(steps),
        reduction=require_reduction(reduction),
        clip_norm=None if clip_norm is None else require_number("clip_norm", clip_norm, above=0),
        skip_norm=None if skip_norm is None else require_number("skip_norm", skip_norm, above=0),
        accumulate_dtype=accumulate_dtype,
        scale_rule=rule,
        on_overflow=cast(OnOverflow, require_choice("on_overflow", on_overflow, ON_OVERFLOW)),
        master_weights=require_bool("master_weights", master_weights),
        scaler=scaler,
        noise_decay=_noise_decay(noise_scale),
    )


def require_reduction(reduction: object) -> Reduction:
    """`reduction` if it is one of `REDUCTIONS`.

    Raises:
        ArgumentTypeError, ArgumentValueError: it is none.
    """
    return cast(Reduction, require_choice("reduction", reduction, REDUCTIONS))


def _noise_decay(noise_scale: object) -> float | None:
    """The decay that ``noise_scale=`` asks for."""
    if isinstance(noise_scale, bool):
        return DECAY if noise_scale else None
    return require_number("noise_scale", noise_scale, above=0, below=1, or_equal=True)
