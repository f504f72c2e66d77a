"""The options of `gradaccum.wrap`, such as the length of a window and the loss scale.
This module also checks the options, for all backends.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal, NamedTuple, Protocol, cast, runtime_checkable

from gradaccum.errors import (
    ArgumentTypeError,
    ArgumentValueError,
    UsageError,
    require_bool,
    require_choice,
    require_int,
    require_number,
)
from gradaccum.state import Scalar

# A window ends after a given number of micro-batches, when it reaches a given weight,
# or when the caller ends it. The number and the weight may change from one update to
# the next.


Sizes = int | tuple[tuple[int, int], ...] | Callable[[Scalar], Scalar]
"""The sizes of the windows: a constant, a tuple of pairs
``(first optimizer_step, size)``, or a function of the optimizer step.
"""


@dataclass(frozen=True)
class UntilWeight:
    """The size of a window that ends when the sum of its micro-batches' weights reaches
    `weight`. See `until_weight`.
    """

    weight: Sizes

    def __repr__(self) -> str:
        return f"until_weight({self.weight!r})"


Schedule = Sizes | UntilWeight | None
"""The type of ``steps=`` after validation."""


def until_weight(weight: object) -> UntilWeight:
    """Define windows by total weight: with ``steps=until_weight(524_288)``, a window
    ends when it contains at least that many items or tokens.

    A window's weight may exceed this number, but by less than the weight of the
    window's last micro-batch. The gradient is divided by the window's actual weight.
    The weight is stored as a float32 (or a float64 if the gradient sums are float64).
    Above 2^24 a float32 can no longer represent every integer. Each micro-batch needs a
    weight, because without a weight it would count as one item.

    Args:
        weight: an int >= 1 (even if the micro-batches' weights are fractions), a list
            of pairs ``(first optimizer_step, weight)``, or a function of the optimizer
            step.

    Raises:
        ArgumentTypeError, ArgumentValueError: `weight` does not have one of these
            forms, or contains a number below 1.

    Examples:
        >>> until_weight(524_288)
        until_weight(524288)
    """
    return UntilWeight(_make_sizes("weight", weight))


def is_known(schedule: Schedule) -> bool:
    """True if the window sizes are known without calling a user-supplied function."""
    if isinstance(schedule, UntilWeight):
        return not callable(schedule.weight)
    return not callable(schedule)


def make_schedule(steps: object) -> Schedule:
    """Return `steps` as a `Schedule`. Raise unless `steps` is an int, a list of pairs,
    a callable, an `UntilWeight` or None.
    """
    if steps is None or isinstance(steps, UntilWeight):
        return steps
    return _make_sizes("steps", steps)


def require_steps(
    size: object, optimizer_step: int, schedule: Schedule
) -> int | UntilWeight:
    """Return `size`, a window size that a user-supplied function has computed. Raise
    unless `size` is an int >= 1, or an `UntilWeight` of an int >= 1.

    A backend calls `require_steps` for step 0 when it wraps an optimizer. After that it
    checks the size of each window, unless the window runs in compiled code. Compiled
    code cannot raise an error, so it treats a window whose size is below 1 as an
    overflow.

    Args:
        size: the size that `gradaccum.kit.steps_at` returned.
        optimizer_step: the number of updates applied before the window.
        schedule: the schedule that returned the size. Only an `UntilWeight` schedule
            may return an `UntilWeight`.
    """
    if isinstance(schedule, UntilWeight):
        weight = cast(UntilWeight, size).weight
        argument = f"until_weight(...)({optimizer_step})"
        return UntilWeight(require_int(argument, weight, at_least=1, fix=_RETURN))
    return require_int(f"steps({optimizer_step})", size, at_least=1, fix=_RETURN)


_RETURN = "Return the window's number of micro-batches or its weight."
_FIXES = {
    "steps": "For example, write steps=4 or steps=[(0, 4), (1000, 8)].",
    "weight": "Write steps=until_weight(524_288) or"
    " until_weight([(0, 65_536), (1000, 524_288)]).",
}


def _make_sizes(name: str, sizes: object) -> Sizes:
    """Return `sizes` as `Sizes`. Raise unless `sizes` is an int, a list of pairs or a
    callable.
    """
    fix = _FIXES[name]
    if callable(sizes):
        return cast(Callable[[Scalar], Scalar], sizes)
    if not isinstance(sizes, list | tuple):
        return require_int(name, sizes, at_least=1, fix=fix)
    pairs = tuple(
        (int(first), require_int(name, size, at_least=1, fix=fix))
        for first, size in sizes
    )
    starts = [first for first, _ in pairs]
    if starts != sorted({0, *starts}):
        raise ArgumentValueError(
            f"{name}: expected pairs in ascending order, starting at optimizer_step 0;"
            f" got {pairs!r} ({type(pairs).__name__}). {fix}"
        )
    return pairs


# Loss scaling: the initial scale, and the rule for changing it. The defaults are the
# same as in `torch.amp.GradScaler`, and the lower bound of 1 is the same as in
# `jmp.DynamicLossScale`.


class ScaleRule(NamedTuple):
    """The constants that control how a loss scale changes. For a static scale, both
    factors and the interval are 1.
    """

    init_scale: float = 1.0
    growth_factor: float = 1.0
    backoff_factor: float = 1.0
    growth_interval: int = 1
    min_scale: float = 0.0
    max_scale: float = math.inf


@dataclass(frozen=True)
class DynamicLossScale:
    """A loss scale that decreases after an overflow and grows after a number of clean
    windows (windows without an overflow). It changes only between windows.

    Args:
        init_scale: the initial scale, > 0.
        growth_factor: the factor by which the scale is multiplied after
            `growth_interval` clean windows, > 1.
        backoff_factor: the factor by which the scale is multiplied after a window with
            an overflow, in (0, 1).
        growth_interval: the number of clean windows before the scale grows, an int >=
            1.
        min_scale: the lower bound of the scale, > 0 and at most `init_scale`.
        max_scale: the upper bound of the scale, at least `init_scale`. Even if
            `max_scale` is inf, the scale stays within float32's range.

    Raises:
        ArgumentValueError: an argument is outside its range.
    """

    init_scale: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    min_scale: float = 1.0
    max_scale: float = math.inf

    def __post_init__(self) -> None:
        if not (
            0 < self.min_scale <= self.init_scale <= self.max_scale
            and 0 < self.backoff_factor < 1 < self.growth_factor
            and self.growth_interval >= 1
        ):
            raise ArgumentValueError(
                "loss_scale: expected values in the ranges documented for"
                f" DynamicLossScale; got {self!r} ({type(self).__name__}). For example,"
                " write DynamicLossScale(init_scale=2.0**16)."
            )

    def rule(self) -> ScaleRule:
        return ScaleRule(**vars(self))


LossScale = DynamicLossScale
"""The type that every backend accepts as ``loss_scale=``, in addition to plain numbers.
"""


@runtime_checkable
class ScalerDriver(Protocol):
    """A backend that accepts its framework's loss scaler as ``loss_scale=``, and
    updates the scaler once per window.
    """

    scaler_kind: str
    """The scaler's type, with an article, as it appears in error messages, such as
    ``"a torch.amp.GradScaler"``.
    """

    def scaler_rule(self, scaler: object) -> ScaleRule | None:
        """Return the rule that `scaler` currently uses to update its scale, or None if
        `scaler` is not a loss scaler of the framework.
        """
        ...


def scale_rule(
    loss_scale: object, driver: ScalerDriver | None
) -> tuple[ScaleRule, Any]:
    """Return the loss-scaling rule selected by `loss_scale`, and the framework's own
    loss scaler if the user passed one (otherwise None).

    Raises:
        ArgumentTypeError, ArgumentValueError: `loss_scale` is none of the following:
            None, a finite number > 0, a `DynamicLossScale`, or a scaler that `driver`
            accepts.
    """
    if loss_scale is None:
        return ScaleRule(), None
    if isinstance(loss_scale, DynamicLossScale):
        return loss_scale.rule(), None
    if isinstance(loss_scale, Real) and not isinstance(loss_scale, bool):
        return ScaleRule(init_scale=require_number("loss_scale", loss_scale)), None
    kinds = "gradaccum.DynamicLossScale"
    if driver is not None:
        rule = driver.scaler_rule(loss_scale)
        if rule is not None:
            return rule, loss_scale
        kinds += f" or {driver.scaler_kind}"
    raise ArgumentTypeError(
        f"loss_scale: expected None, a number > 0 or {kinds}; got {loss_scale!r}"
        f" ({type(loss_scale).__name__}). Write"
        " loss_scale=gradaccum.DynamicLossScale()."
    )


Reduction = Literal["mean", "sum", "sum_per_item"]
OnOverflow = Literal["skip_window", "drop_micro_batch", "ignore"]

REDUCTIONS = ("mean", "sum", "sum_per_item")
ON_OVERFLOW = ("skip_window", "drop_micro_batch", "ignore")


class Options(NamedTuple):
    """The checked options of `gradaccum.wrap`. They do not change after wrapping, so
    compiled code may branch on them with Python's ``if``.
    """

    steps: Schedule
    """The length of each window, or None if the caller closes every window."""
    reduction: Reduction
    clip_norm: float | None
    skip_norm: float | None
    accumulate_dtype: Any
    """The dtype of the gradient sum, or the dtype's name. None means float32 for
    half-precision gradients, and the gradient's own dtype for other gradients.
    """
    scale_rule: ScaleRule
    on_overflow: OnOverflow
    master_weights: bool = False
    scaler: Any = None
    """The framework's own loss scaler, such as a `torch.amp.GradScaler`, if the user
    passed one as ``loss_scale=``, otherwise None. The backend updates this scaler.
    """
    separate_sums: bool = False
    """True if the gradient sums are kept in separate buffers. The user may then modify
    the framework's own gradient field, such as ``.grad``.
    """


_NO_LIMIT = "Write None for no limit, because a limit of 0 would remove the gradient."


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
    driver: ScalerDriver | None = None,
) -> Options:
    """Check the options of `gradaccum.wrap`, and return them. `driver` is the
    optimizer's backend, which handles a loss scaler of its framework, such as a
    `torch.amp.GradScaler`, if the user passes one as ``loss_scale=``. None means that
    no such scaler is accepted.
    """
    rule, scaler = scale_rule(loss_scale, driver)
    for name, norm in {"clip_norm": clip_norm, "skip_norm": skip_norm}.items():
        if norm is not None:
            require_number(name, norm, fix=_NO_LIMIT)
    # A disabled torch.amp.GradScaler is accepted, because its scale is always 1.
    if on_overflow == "ignore" and rule.backoff_factor != 1:
        raise ArgumentValueError(
            'loss_scale: expected a static scale, because with on_overflow="ignore"'
            " overflows are not detected, so a dynamic scale would never be reduced;"
            f" got {loss_scale!r} ({type(loss_scale).__name__}). Pass a number, or"
            " leave on_overflow out."
        )
    return Options(
        steps=make_schedule(steps),
        reduction=require_reduction(reduction),
        clip_norm=None if clip_norm is None else float(clip_norm),
        skip_norm=None if skip_norm is None else float(skip_norm),
        accumulate_dtype=accumulate_dtype,
        scale_rule=rule,
        on_overflow=cast(
            OnOverflow, require_choice("on_overflow", on_overflow, ON_OVERFLOW)
        ),
        master_weights=require_bool("master_weights", master_weights),
        scaler=scaler,
    )


def require_reduction(reduction: object) -> Reduction:
    """Return `reduction`. Raise `ArgumentTypeError` or `ArgumentValueError` unless it
    is "mean", "sum" or "sum_per_item".
    """
    return cast(Reduction, require_choice("reduction", reduction, REDUCTIONS))


def use_of_weights(options: Options) -> str | None:
    """Return the option that makes weights mandatory, as the user wrote it, such as
    ``reduction="sum_per_item"``. Return None if weights are optional.
    """
    if isinstance(options.steps, UntilWeight):
        return "steps=until_weight(...)"
    if options.reduction == "sum_per_item":
        return 'reduction="sum_per_item"'
    return None


def given_weight(weight: Scalar | None, use: str | None) -> Scalar:
    """Return the `weight` of a micro-batch, or 1 if `weight` is None.

    - `use`: the result of `use_of_weights`.

    Raises:
        ArgumentTypeError: `weight` is None although an option requires weights.
    """
    if weight is None and use is not None:
        raise ArgumentTypeError(
            "weight: expected the number of items (tokens) in the micro-batch, because"
            f" {use} needs this number; got {weight!r} ({type(weight).__name__}). Pass"
            f" weight=n with each micro-batch, or leave {use} out."
        )
    return 1.0 if weight is None else weight


def require_denominator_allowed(options: Options, *, several: bool = False) -> None:
    """Raise unless ``flush(denominator=...)`` is allowed. It is allowed only with
    ``steps=None`` and a single worker.
    """
    if several or options.steps is not None:
        raise UsageError(
            "denominator: expected no denominator when steps= determines where windows"
            " end, or when there are several workers; got a denominator. To pass a"
            " denominator, write steps=None and call flush(denominator=n) at the end of"
            " each window. With several workers, pass the weight of each micro-batch"
            " instead."
        )


def require_denominator(
    denominator: object, options: Options, *, several: bool = False
) -> float:
    """Return `denominator` as a float. Raise unless ``flush(denominator=...)`` is
    allowed and the number is finite and > 0.

    `several`: True if several workers share the window. They may not pass a
    denominator, because each of them could pass a different number.
    """
    require_denominator_allowed(options, several=several)
    return require_number("denominator", denominator)
