"""The loss scale: a `mindspore.amp.DynamicLossScaler` that the wrapped optimizer
drives, and who has read the scale.

The window's end divides gradients by the loss scale, so the user must have multiplied
the loss by it, which stock cells such as `mindspore.nn.TrainOneStepCell` cannot. So
`note_read` stands where somebody reads the scale, and `require_read` where a gradient
comes in. Both run as Python while MindSpore compiles a program, and at each call in
PyNative.

On a driven scaler `adjust` raises, and so does `unscale` of gradients: the window's end
does both. `drive` replaces the methods on the object, where compiled code finds them
too.
"""

from __future__ import annotations

from itertools import count
from types import MethodType

from mindspore import Tensor
from mindspore.amp import DynamicLossScaler
from mindspore.ops import constexpr

from gradaccum import ArgumentValueError, UsageError
from gradaccum.kit import Options, ScaleRule, explain

NEVER = 0

_keys = count(1)
_read: set[int] = set()


def key_of(options: Options) -> int:
    """Return a constant that names one accumulation in compiled code."""
    return NEVER if options.scale_rule == ScaleRule() else next(_keys)


@constexpr  # type: ignore[untyped-decorator]
def note_read(key: int) -> bool:
    _read.add(key)
    return True


@constexpr  # type: ignore[untyped-decorator]
def require_read(key: int) -> bool:
    if key == NEVER or key in _read:
        return True
    raise explain(
        UsageError,
        "gradients",
        expected="gradients of the loss times the loss scale",
        found="a micro-batch before anyone asked for the loss scale",
        fix=(
            "Train with gradaccum_mindspore.TrainOneStepCell(network, optimizer), which"
            " mindspore.train.Model takes as its network; or return"
            " optimizer.scale(loss) from the function that is differentiated; or pass"
            " optimizer.loss_scale as sens (reading optimizer.result does not count)."
        ),
    )


scaler_kind = "a mindspore.amp.DynamicLossScaler"
"""As `gradaccum.kit.make_options` names what it takes: it asks this module as its
driver of scalers.
"""


def scaler_rule(scaler: object) -> ScaleRule | None:
    """Return the rule of a `mindspore.amp.DynamicLossScaler`, with a floor of 1; None
    for another object.
    """
    if not isinstance(scaler, DynamicLossScaler):
        return None
    factor = float(scaler.scale_factor)
    return ScaleRule(
        float(scaler.scale_value),
        factor,
        1 / factor,
        int(scaler.scale_window),
        min_scale=1.0,
    )


def drive(scaler: DynamicLossScaler, key: int) -> None:
    if hasattr(scaler, "driven_by"):
        raise explain(
            ArgumentValueError,
            "loss_scale",
            expected="a scaler that no other wrapped optimizer drives, because each"
            " moves it at the end of its own windows",
            found="one that is driven already",
            fix="Give each optimizer a scaler of its own, or"
            " loss_scale=gradaccum.DynamicLossScale().",
        )
    scaler.driven_by = key
    scaler.bare_scale = scaler.scale
    scaler.bare_unscale = scaler.unscale
    scaler.scale = MethodType(_scale, scaler)
    scaler.unscale = MethodType(_unscale, scaler)
    scaler.adjust = MethodType(_adjust, scaler)


def _scale(self: DynamicLossScaler, inputs: Tensor) -> Tensor:
    note_read(self.driven_by)
    return self.bare_scale(inputs)


def _unscale(self: DynamicLossScaler, inputs: Tensor) -> Tensor:
    if not isinstance(inputs, Tensor):
        _refuse_call("unscale(gradients)")
    return self.bare_unscale(inputs)


def _adjust(self: DynamicLossScaler, grads_finite: Tensor) -> bool:
    _refuse_call("adjust(finite)")
    return True


@constexpr  # type: ignore[untyped-decorator]
def _refuse_call(call: str) -> None:
    raise explain(
        UsageError,
        f"scaler.{call}",
        expected="to be left out, because the wrapped optimizer does it once per"
        " window",
        found="a call",
        fix="Hand optimizer(gradients) the gradients of scaler.scale(loss) as they are,"
        " in every micro-batch, finite or not.",
    )
