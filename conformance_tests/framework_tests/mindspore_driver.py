"""A wrapped optimizer over one parameter, called with plain numbers in any of
MindSpore's three modes.
"""

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn

import gradaccum

from .mindspore_common import set_mode


def driver(mode, steps, loss_scale=None, dtype=None, **options):
    """A wrapped SGD, a call that takes one gradient value and a weight, and the
    parameter, three ones.
    """
    set_mode(mode)
    parameter = Parameter(Tensor(np.ones(3), dtype or ms.float32), name="p")
    optimizer = gradaccum.wrap(
        nn.SGD([parameter], 1.0), steps=steps, loss_scale=loss_scale, **options
    )
    optimizer.scale(Tensor(1.0))  # the gradients below are those of a scaled loss

    @ms.jit
    def jitted(gradient, weight):
        return optimizer((gradient,), weight=weight)

    def call(value, weight=1.0):
        gradient = Tensor(np.array([0.0, value, 0.0]), parameter.dtype)
        amount = Tensor(weight, ms.float32)
        return (
            jitted(gradient, amount)
            if mode == "jit"
            else optimizer((gradient,), weight=amount)
        )

    return optimizer, call, parameter
