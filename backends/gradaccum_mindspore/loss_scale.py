"""Check that the training step reads the loss scale.

At the end of a window the gradients are divided by the loss scale, so the training step
must multiply the loss by the scale. MindSpore's own cells, such as
`mindspore.nn.TrainOneStepCell`, cannot do this. To detect a training step that does not
scale the loss, `note_read` is called wherever the scale is read, and `require_read` is
called wherever gradients are passed to the optimizer. In compiled code, both functions
run only while MindSpore compiles the program. In PyNative mode, they run at each call.
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
    """Return a number that identifies one wrapped optimizer in compiled code, or
    `NEVER` if the optimizer has no loss scale.
    """
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
        "gradients: expected the gradients of the loss times the loss scale; got the"
        " gradients of a loss that cannot have been scaled, because the loss scale was"
        " never read. Train with"
        " gradaccum_mindspore.TrainOneStepCell(network, optimizer), which you can also"
        " pass to mindspore.train.Model. In your own training step, return"
        " optimizer.scale(loss) from the function that you differentiate, or pass"
        " optimizer.loss_scale as sens. Reading the scale from optimizer.result does"
        " not prevent this error."
    )
