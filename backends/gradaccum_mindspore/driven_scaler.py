"""A `mindspore.amp.DynamicLossScaler` that was given as the loss scale: driven by one wrapped optimizer, once per window.

MindSpore's own loop unscales the gradients and adjusts the scale in every micro-batch. Beside the wrapped optimizer, which does both at
the window's end, that would divide twice and move the scale within a window. So on the scaler that was given `adjust`, and `unscale` of
gradients, raise; `unscale` of a loss stays. The methods are replaced on the object, where compiled code finds them too.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

from mindspore import Tensor, amp
from mindspore.ops import constexpr

from gradaccum import ArgumentValueError, UsageError
from gradaccum.kit import ScaleRule, explain
from gradaccum_mindspore.scaled import note_read


def scaler_rule(scaler: object) -> ScaleRule | None:
    """How a `mindspore.amp.DynamicLossScaler` moves, from the scale that it has now; it has a floor of 1. None for another object."""
    if not isinstance(scaler, amp.DynamicLossScaler):
        return None
    factor = float(scaler.scale_factor)
    return ScaleRule(float(scaler.scale_value), factor, 1 / factor, int(scaler.scale_window), min_scale=1.0)


def drive(scaler: Any, key: int) -> None:
    """Take `scaler` over for the accumulation called `key`.

    Raises:
        ArgumentValueError: another accumulation drives it, which would move the scale in mid-window.
    """
    if hasattr(scaler, "driven_by"):
        expected = "a scaler that no other wrapped optimizer drives, as each moves it at the end of its own windows"
        fix = "Give each optimizer a scaler of its own, or loss_scale=gradaccum.DynamicLossScale()."
        raise explain(ArgumentValueError, "loss_scale", expected=expected, found="one that is driven already", fix=fix)
    scaler.driven_by = key
    scaler.bare_scale, scaler.bare_unscale = scaler.scale, scaler.unscale
    scaler.scale, scaler.unscale, scaler.adjust = (MethodType(method, scaler) for method in (_scale, _unscale, _adjust))


def _scale(self: Any, inputs: Any) -> Any:
    note_read(self.driven_by)
    return self.bare_scale(inputs)


def _unscale(self: Any, inputs: Any) -> Any:
    if not isinstance(inputs, Tensor):
        _leave_out("unscale(gradients)")
    return self.bare_unscale(inputs)


def _adjust(self: Any, grads_finite: Any) -> Any:
    _leave_out("adjust(finite)")
    return True


@constexpr  # type: ignore[untyped-decorator]
def _leave_out(call: str) -> None:
    expected = "to be left out, as the wrapped optimizer does it once per window"
    fix = "Hand optimizer(gradients) the gradients of scaler.scale(loss) as they are, in every micro-batch, finite or not."
    raise explain(UsageError, f"scaler.{call}", expected=expected, found="a call", fix=fix)
