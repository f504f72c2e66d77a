"""Whether anyone has asked for the loss scale: noted where it is read, required where a gradient comes in.

A gradient that comes in is divided by the loss scale, so the loss it belongs to was multiplied by it before. Stock cells such as
`mindspore.nn.TrainOneStepCell` have no place for that: the gradient would be too small by the whole scale, which Adam nearly hides.
Both sides run as Python while a program is compiled, and at each call in PyNative.
"""

from __future__ import annotations

from itertools import count

from mindspore.ops import constexpr

from gradaccum import UsageError
from gradaccum.kit import Options, ScaleRule, explain

NEVER = 0
"""The key of an accumulation whose loss needs no scaling."""

_keys = count(1)
_read: set[int] = set()


def key_of(options: Options) -> int:
    """A constant by which compiled code names one accumulation."""
    return NEVER if options.scale_rule == ScaleRule() else next(_keys)


@constexpr  # type: ignore[untyped-decorator]
def note_read(key: int) -> bool:
    """The loss scale was asked for."""
    _read.add(key)
    return True


@constexpr  # type: ignore[untyped-decorator]
def require_read(key: int) -> bool:
    """Raise `UsageError` if gradients come in whose loss nobody can have scaled."""
    if key == NEVER or key in _read:
        return True
    raise explain(
        UsageError,
        "gradients",
        expected="gradients of the loss times the loss scale",
        found="a micro-batch before anyone asked for the loss scale",
        fix="Train with gradaccum_mindspore.TrainOneStepCell(network, optimizer), which mindspore.train.Model takes as its network; or "
        "return optimizer.scale(loss) from the function that is differentiated; or pass optimizer.loss_scale as sens.",
    )
