"""A `mindspore.amp.DynamicLossScaler` given as the loss scale: one wrapped optimizer drives it, once per window.

MindSpore's own loop unscales the gradients and adjusts the scale in every micro-batch. The wrapped optimizer does both at the window's end,
so that loop would divide twice and move the scale within a window. On a driven scaler `adjust` raises, and so does `unscale` of gradients;
`unscale` of a loss stays. `drive` replaces the methods on the object, where compiled code finds them too.
"""

from __future__ import annotations

from types import MethodType

from mindspore import Tensor
from mindspore.amp import DynamicLossScaler
from mindspore.ops import constexpr

from gradaccum import ArgumentValueError, UsageError
from gradaccum.kit import ScaleRule, explain
from gradaccum_mindspore.scaled import note_read


def scaler_rule(scaler: object) -> ScaleRule | None:
    """The rule of a `mindspore.amp.DynamicLossScaler`, which starts at its current scale and has a floor of 1. None for another object."""
    if not isinstance(scaler, DynamicLossScaler):
        return None
    factor = float(scaler.scale_factor)
    return ScaleRule(float(scaler.scale_value), factor, 1 / factor, int(scaler.scale_window), min_scale=1.0)


def drive(scaler: DynamicLossScaler, key: int) -> None:
    """Take `scaler` over for the accumulation called `key`.

    Raises:
        ArgumentValueError: another accumulation drives it, and would move the scale in mid-window.
    """
    if hasattr(scaler, "driven_by"):
        expected = "a scaler that no other wrapped optimizer drives, because each moves it at the end of its own windows"
        fix = "Give each optimizer a scaler of its own, or loss_scale=gradaccum.DynamicLossScale()."
        raise explain(ArgumentValueError, "loss_scale", expected=expected, found="one that is driven already", fix=fix)
    scaler.driven_by = key
    scaler.bare_scale, scaler.bare_unscale = scaler.scale, scaler.unscale
    scaler.scale, scaler.unscale, scaler.adjust = (MethodType(method, scaler) for method in (_scale, _unscale, _adjust))


def _scale(self: DynamicLossScaler, inputs: Tensor) -> Tensor:
    note_read(self.driven_by)
    return self.bare_scale(inputs)


def _unscale(self: DynamicLossScaler, inputs: Tensor) -> Tensor:
    if not isinstance(inputs, Tensor):
        _leave_out("unscale(gradients)")
    return self.bare_unscale(inputs)


def _adjust(self: DynamicLossScaler, grads_finite: Tensor) -> bool:
    _leave_out("adjust(finite)")
    return True


@constexpr  # type: ignore[untyped-decorator]
def _leave_out(call: str) -> None:
    expected = "to be left out, because the wrapped optimizer does it once per window"
    fix = "Hand optimizer(gradients) the gradients of scaler.scale(loss) as they are, in every micro-batch, finite or not."
    raise explain(UsageError, f"scaler.{call}", expected=expected, found="a call", fix=fix)
