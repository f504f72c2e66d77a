"""Loss scaling: how the scale starts and by which rule it moves. `gradaccum.transitions` moves it.

Defaults are `torch.amp.GradScaler`'s (init 2^16, growth 2, backoff 0.5, interval 2000); the floor of 1 is
`jmp.DynamicLossScale`'s (`min_loss_scale`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real
from typing import Any, NamedTuple, Protocol, runtime_checkable

from gradaccum._validation import require_int, require_number
from gradaccum.errors import ArgumentTypeError, ArgumentValueError, explain


class ScaleRule(NamedTuple):
    """The constants of the transition. A scale that never moves is the rule with both factors 1 and an interval of 1."""

    init_scale: float = 1.0
    growth_factor: float = 1.0
    backoff_factor: float = 1.0
    growth_interval: int = 1
    min_scale: float = 0.0
    max_scale: float = math.inf


@dataclass(frozen=True)
class StaticLossScale:
    """A loss scale that never changes.

    Args:
        scale: a finite number > 0.

    Raises:
        ArgumentTypeError, ArgumentValueError: `scale` is not such a number.
    """

    scale: float

    def __post_init__(self) -> None:
        require_number("scale", self.scale, above=0)

    def rule(self) -> ScaleRule:
        return ScaleRule(init_scale=float(self.scale))


@dataclass(frozen=True)
class DynamicLossScale:
    """A loss scale that backs off after an overflow and grows after clean windows; it moves only between windows.

    Args:
        init_scale: the first scale, > 0.
        growth_factor: multiplies it after `growth_interval` clean windows, > 1.
        backoff_factor: multiplies it after a window with an overflow, in (0, 1).
        growth_interval: clean windows between two growths, an int >= 1.
        min_scale: the floor, > 0 and at most `init_scale`.
        max_scale: the ceiling, at least `init_scale`; inf is float32's own: a growth that would leave its range is not made.

    Raises:
        ArgumentTypeError, ArgumentValueError: an argument is not as above.
    """

    init_scale: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    min_scale: float = 1.0
    max_scale: float = math.inf

    def __post_init__(self) -> None:
        require_number("init_scale", self.init_scale, above=0)
        require_number("growth_factor", self.growth_factor, above=1)
        require_number("backoff_factor", self.backoff_factor, above=0, below=1)
        require_int("growth_interval", self.growth_interval, at_least=1)
        require_number("min_scale", self.min_scale, above=0)
        require_number("max_scale", self.max_scale, above=0, allow_infinity=True)
        if not self.min_scale <= self.init_scale <= self.max_scale:
            raise explain(
                ArgumentValueError,
                "init_scale",
                expected=f"a number between min_scale={self.min_scale} and max_scale={self.max_scale}",
                got=self.init_scale,
                fix="Move the limit or the initial scale.",
            )

    def rule(self) -> ScaleRule:
        return ScaleRule(
            float(self.init_scale),
            float(self.growth_factor),
            float(self.backoff_factor),
            self.growth_interval,
            float(self.min_scale),
            float(self.max_scale),
        )


LossScale = StaticLossScale | DynamicLossScale
"""The rules that every backend takes as ``loss_scale=``, beside a number."""


@runtime_checkable
class ScalerDriver(Protocol):
    """A backend that takes its framework's own loss scaler as ``loss_scale=`` and drives it once per window."""

    scaler_kind: str
    """The scaler's type with an article, for messages: ``"a torch.amp.GradScaler"``."""

    def scaler_rule(self, scaler: object) -> ScaleRule | None:
        """The rule by which `scaler` moves now; None if it is another kind of object."""
        ...


def scale_rule(loss_scale: object, driver: ScalerDriver | None = None) -> tuple[ScaleRule, Any]:
    """The rule of what the user gave as ``loss_scale=``, and the framework's own scaler if it is one, else None.

    No loss scale is a scale of 1 that never moves.

    Raises:
        ArgumentTypeError: it is neither None, a number, a rule of gradaccum's nor a scaler that `driver` takes.
        ArgumentValueError: a number that is not finite or not above 0.
    """
    if loss_scale is None:
        return ScaleRule(), None
    if isinstance(loss_scale, (StaticLossScale, DynamicLossScale)):
        return loss_scale.rule(), None
    if isinstance(loss_scale, Real) and not isinstance(loss_scale, bool):
        return ScaleRule(init_scale=require_number("loss_scale", loss_scale, above=0)), None
    rule = None if driver is None else driver.scaler_rule(loss_scale)
    if rule is None:
        raise _loss_scale_error(loss_scale, "" if driver is None else f" or {driver.scaler_kind}")
    return rule, loss_scale


def _loss_scale_error(got: object, or_own: str) -> ArgumentTypeError:
    expected = f"None, a number > 0, gradaccum.StaticLossScale, gradaccum.DynamicLossScale{or_own}"
    fix = "Write loss_scale=gradaccum.DynamicLossScale(), with the factors and the interval of a scaler that it replaces."
    return explain(ArgumentTypeError, "loss_scale", expected=expected, got=got, fix=fix)
