"""The inner optimizer's own static loss scale: `mindspore.nn.SGD(..., loss_scale=1024.0)` divides each gradient it is handed by 1024.

It is one half of MindSpore's pair for a static scale; the other half, `mindspore.amp.FixedLossScaleManager` or ``sens=``, multiplies the
loss. So it counts as the loss scale here, and norms are norms of the true gradient. The inner optimizer gets the window's gradient times
that scale, and divides by it as it would alone.
"""

from __future__ import annotations

from gradaccum import ArgumentValueError
from gradaccum.kit import Options, ScaleRule, explain
from gradaccum_mindspore.types import Optimizer


def inner_scale(inner: Optimizer) -> float:
    """The scale that `inner` divides gradients by; 1 for an optimizer that has no loss scale."""
    return float(getattr(inner, "loss_scale", 1.0))


def with_inner_scale(options: Options, inner: Optimizer) -> Options:
    """`options` with the inner optimizer's loss scale.

    Raises:
        ArgumentValueError: there are two loss scales; each gradient would be divided twice.
    """
    scale = inner_scale(inner)
    if scale == 1:
        return options
    if options.scale_rule != ScaleRule():
        expected, found = f"None, because the optimizer divides by its own loss_scale={scale:g}", f"{options.scale_rule.init_scale:g}"
        fix = "Leave loss_scale out of the optimizer: gradaccum.wrap(nn.SGD(parameters, 0.1), steps=4, loss_scale=1024.0)."
        raise explain(ArgumentValueError, "loss_scale", expected=expected, found=found, fix=fix)
    return options._replace(scale_rule=ScaleRule(init_scale=scale))
