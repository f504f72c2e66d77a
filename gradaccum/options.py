"""The options of an accumulation, checked once for every backend: window length, loss
scale and the rest.
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

# How long a window is: so many micro-batches, or until a weight is reached; a constant,
# pairs, a function, or the caller's decision.


Sizes = int | tuple[tuple[int, int], ...] | Callable[[Scalar], Scalar]
"""A size for each optimizer step: a constant, pairs, or a function."""


@dataclass(frozen=True)
class UntilWeight:
    """A window that ends when its weight reaches `weight`; see `until_weight`."""

    weight: Sizes

    def __repr__(self) -> str:
        return f"until_weight({self.weight!r})"


Schedule = Sizes | UntilWeight | None
"""`steps` as the options hold it."""


def until_weight(weight: object) -> UntilWeight:
    """Make windows end by weight: ``steps=until_weight(524_288)`` ends a window when it
    holds that many items or tokens.

    A window may exceed the number by less than its last micro-batch; the gradient is
    divided by the weight that the window holds. That weight is a float32 (float64
    beside float64 sums), which beyond 2^24 counts in steps of 2, 4, ...

    Args:
        weight: an int >= 1, also where weights are fractions; or pairs
            ``(first optimizer_step, weight)`` or a callable of the optimizer step.

    Each micro-batch needs its weight then: without one it would count as one item.

    Raises:
        ArgumentTypeError, ArgumentValueError: `weight` is none of these.

    Examples:
        >>> until_weight(524_288)
        until_weight(524288)
    """
    return UntilWeight(_make_sizes("weight", weight))


def is_known(schedule: Schedule) -> bool:
    """True if the sizes are known without calling a function."""
    if isinstance(schedule, UntilWeight):
        return not callable(schedule.weight)
    return not callable(schedule)


def make_schedule(steps: object) -> Schedule:
    """Raise unless the user's ``steps=`` has one of the five forms; return the
    schedule.
    """
    if steps is None or isinstance(steps, UntilWeight):
        return steps
    return _make_sizes("steps", steps)


def require_steps(
    size: object, optimizer_step: int, schedule: Schedule
) -> int | UntilWeight:
    """Raise unless a callable returned an int >= 1, or an `UntilWeight` of one.

    A backend calls this when it wraps, for step 0, and for each window outside compiled
    code. Compiled code cannot raise: there each window of a size below 1 is an
    overflow.

    Args:
        size: as `gradaccum.kit.steps_at` returns it.
        optimizer_step: updates before the window.
        schedule: the schedule that was asked. Only an `UntilWeight` schedule may return
            an `UntilWeight`.
    """
    if isinstance(schedule, UntilWeight):
        weight = cast(UntilWeight, size).weight
        argument = f"until_weight(...)({optimizer_step})"
        return UntilWeight(require_int(argument, weight, at_least=1, fix=_RETURN))
    return require_int(f"steps({optimizer_step})", size, at_least=1, fix=_RETURN)


_RETURN = "Return how many micro-batches, or how much weight, that window has."
_FIXES = {
    "steps": "Write for example steps=4, or steps=[(0, 4), (1000, 8)].",
    "weight": "Write steps=until_weight(524_288), or"
    " until_weight([(0, 65_536), (1000, 524_288)]).",
}


def _make_sizes(name: str, sizes: object) -> Sizes:
    """Check a number, pairs or a callable."""
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
            f"{name}: expected pairs that begin at optimizer_step 0 and go up; got"
            f" {pairs!r} ({type(pairs).__name__}). {fix}"
        )
    return pairs


# Loss scaling: how the scale starts and by which rule it moves. Defaults are
# `torch.amp.GradScaler`'s; the floor of 1 is `jmp.DynamicLossScale`'s.


class ScaleRule(NamedTuple):
    """The constants by which a loss scale moves. A static scale has both factors 1 and
    an interval of 1.
    """

    init_scale: float = 1.0
    growth_factor: float = 1.0
    backoff_factor: float = 1.0
    growth_interval: int = 1
    min_scale: float = 0.0
    max_scale: float = math.inf


@dataclass(frozen=True)
class DynamicLossScale:
    """A loss scale that backs off after an overflow and grows after clean windows. It
    moves only between windows.

    Args:
        init_scale: the first scale, > 0.
        growth_factor: multiplies the scale after `growth_interval` clean windows, > 1.
        backoff_factor: multiplies the scale after a window with an overflow, in (0, 1).
        growth_interval: clean windows between two growths, an int >= 1.
        min_scale: the floor, > 0 and at most `init_scale`.
        max_scale: the ceiling, at least `init_scale`. With inf the scale stays within
            float32's range.

    Raises:
        ArgumentValueError: an argument is not as above.
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
                "loss_scale: expected numbers in the ranges that DynamicLossScale"
                f" names; got {self!r} ({type(self).__name__}). Write for example"
                " DynamicLossScale(init_scale=2.0**16)."
            )

    def rule(self) -> ScaleRule:
        return ScaleRule(**vars(self))


LossScale = DynamicLossScale
"""What every backend takes as ``loss_scale=``, beside a number."""


@runtime_checkable
class ScalerDriver(Protocol):
    """A backend that accepts its framework's loss scaler as ``loss_scale=`` and drives
    it once per window.
    """

    scaler_kind: str
    """The scaler's type with an article, for messages: ``"a torch.amp.GradScaler"``."""

    def scaler_rule(self, scaler: object) -> ScaleRule | None:
        """Return the rule by which `scaler` moves now; None if `scaler` is another kind
        of object.
        """
        ...


def scale_rule(
    loss_scale: object, driver: ScalerDriver | None = None
) -> tuple[ScaleRule, Any]:
    """Return the rule of the user's ``loss_scale=``, and the framework's own scaler if
    it is one, else None.

    Raises:
        ArgumentTypeError, ArgumentValueError: it is neither None, a finite number > 0,
            a rule nor a scaler that `driver` takes.
    """
    if loss_scale is None:
        return ScaleRule(), None
    if isinstance(loss_scale, DynamicLossScale):
        return loss_scale.rule(), None
    if isinstance(loss_scale, Real) and not isinstance(loss_scale, bool):
        number = require_number("loss_scale", loss_scale, above=0)
        return ScaleRule(init_scale=number), None
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
    """The checked options of `gradaccum.wrap`. They are constants of the program, so
    the transitions may branch on them.
    """

    steps: Schedule
    """Micro-batches per window; None: the caller closes every window."""
    reduction: Reduction
    clip_norm: float | None
    skip_norm: float | None
    accumulate_dtype: Any
    """The framework's dtype or its name; None: float32 for half-precision gradients,
    else the gradient's own.
    """
    scale_rule: ScaleRule
    on_overflow: OnOverflow
    master_weights: bool = False
    scaler: Any = None
    """The framework's loss scaler, if given as the loss scale: the backend drives it.
    """
    separate_sums: bool = False
    """Leave the place where the framework puts gradients to the user."""


_NO_LIMIT = "Write None for no limit, as 0 would leave nothing of the gradient."


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
    """Check the options of `gradaccum.wrap`; `driver` is the backend if it drives loss
    scalers of its framework.
    """
    rule, scaler = scale_rule(loss_scale, driver)
    for name, norm in {"clip_norm": clip_norm, "skip_norm": skip_norm}.items():
        if norm is not None:
            require_number(name, norm, above=0, fix=_NO_LIMIT)
    # A disabled torch.amp.GradScaler passes: its scale is 1.
    if on_overflow == "ignore" and rule.backoff_factor != 1:
        raise ArgumentValueError(
            'loss_scale: expected one that does not move, as on_overflow="ignore" looks'
            f" for no overflow that it could back off from; got {loss_scale!r}"
            f" ({type(loss_scale).__name__}). Give a number, or leave on_overflow out."
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
    """Raise unless `reduction` is "mean", "sum" or "sum_per_item" (`ArgumentTypeError`,
    `ArgumentValueError`); return it.
    """
    return cast(Reduction, require_choice("reduction", reduction, REDUCTIONS))


def use_of_weights(options: Options) -> str | None:
    """Return the option that gives each micro-batch's weight a meaning of its own, as
    the user writes it; None if a micro-batch may have no weight.
    """
    if isinstance(options.steps, UntilWeight):
        return "steps=until_weight(...)"
    if options.reduction == "sum_per_item":
        return 'reduction="sum_per_item"'
    return None


def given_weight(weight: Scalar | None, use: str | None) -> Scalar:
    """Return the weight of a micro-batch, 1 where None was given.

    - `use`: `use_of_weights`.

    Raises:
        ArgumentTypeError: None was given, and an option uses the weights.
    """
    if weight is None and use is not None:
        raise ArgumentTypeError(
            "weight: expected the number of items (tokens) in the micro-batch, for"
            f" {use}; got {weight!r} ({type(weight).__name__}). Pass weight=n with each"
            f" micro-batch, or leave {use} out."
        )
    return 1.0 if weight is None else weight


def require_denominator_allowed(options: Options, *, several: bool = False) -> None:
    """Raise unless ``flush(denominator=...)`` can mean something: one worker closes
    every window.
    """
    if several or options.steps is not None:
        raise UsageError(
            "denominator: expected to be left out beside steps=, which closes windows"
            " by itself, and where several workers share the window; got one. Write"
            " steps=None, and call flush(denominator=n) where a window ends; on several"
            " workers give each micro-batch its weight."
        )


def require_denominator(
    denominator: object, options: Options, *, several: bool = False
) -> float:
    """Raise unless ``flush(denominator=...)`` is allowed and has a finite number > 0;
    return the number as a float.

    `several`: workers share the window, each of which has a `denominator` of its own.
    """
    require_denominator_allowed(options, several=several)
    return require_number("denominator", denominator, above=0)
