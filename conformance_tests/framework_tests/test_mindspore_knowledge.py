"""A window's statistics beyond the shared suite: losses that are bad, windows that
compiled code cannot refuse.
"""

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn

import gradaccum
from conformance_tests.framework_tests.mindspore_common import (
    pynative_after,  # noqa: F401
    set_mode,
)


def driver(mode, **options):
    """A wrapped SGD of one parameter, and a call with a gradient, a loss and a
    weight.
    """
    set_mode(mode)
    optimizer = gradaccum.wrap(
        nn.SGD([Parameter(Tensor(np.ones(2, np.float32)), name="p")], 1.0), **options
    )

    @ms.jit
    def told(gradient, weight, loss):
        return optimizer((gradient,), weight, loss)

    def call(value, loss, weight):
        gradient = Tensor(np.array([value, 0.0], np.float32))
        return told(gradient, Tensor(weight, ms.float32), Tensor(loss, ms.float32))

    return optimizer, call


def test_ignored_overflow_makes_no_unsound_update():
    """A negative weight, which only compiled code lets through, and a size below 1,
    which compiled code cannot refuse.
    """
    options = {"on_overflow": "ignore", "reduction": "sum"}
    optimizer, call = driver("jit", steps=2, **options)
    call(1.0, 1.0, -1.0)
    call(1.0, 1.0, 2.0)
    assert (optimizer.result.skipped, optimizer.result.overflow) == (True, True)
    for steps in (shrinking, gradaccum.until_weight(shrinking)):
        optimizer, call = driver("jit", steps=steps, **options)
        call(1.0, 1.0, 1.0)
        assert optimizer.result.applied
        call(1.0, 1.0, 1.0)
        assert (optimizer.result.skipped, optimizer.result.overflow) == (True, True)


def shrinking(optimizer_step):
    return 1 - optimizer_step
