"""The readers of the loss scale.

The window's end divides gradients by the loss scale, so the user must have multiplied
the loss by it, which stock cells such as `mindspore.nn.TrainOneStepCell` cannot. So
`note_read` stands where somebody reads the scale, and `require_read` where a gradient
comes in. Both run as Python while MindSpore compiles a program, and at each call in
PyNative.
"""

from __future__ import annotations

from itertools import count

from mindspore.ops import constexpr

from gradaccum import UsageError
from gradaccum.kit import Options, ScaleRule

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
    raise UsageError(
        "gradients: expected gradients of the loss times the loss scale; got a"
        " micro-batch before anyone asked for the loss scale. Train with"
        " gradaccum_mindspore.TrainOneStepCell(network, optimizer), which"
        " mindspore.train.Model takes as its network; or return optimizer.scale(loss)"
        " from the function that is differentiated; or pass optimizer.loss_scale as"
        " sens (reading optimizer.result does not count)."
    )
