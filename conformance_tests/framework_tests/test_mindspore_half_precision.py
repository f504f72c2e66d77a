"""Half precision in MindSpore: which sums and losses float16 can hold, and which
overflow.
"""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn

import gradaccum
from conformance_tests.framework_tests.mindspore_common import (
    BFLOAT16,
    MODES,
    pynative_after,  # noqa: F401
    set_mode,
    two_parameters,
)
from conformance_tests.framework_tests.mindspore_driver import driver


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "dtype",
    [
        pytest.param(ms.float16, id="float16"),
        pytest.param(ms.bfloat16, id="bfloat16", marks=BFLOAT16),
    ],
)
def test_half_sum_is_divided_in_float32(mode, dtype):
    """The divisor, 2^16 x 2, is no float16 number: a division in float16 would make
    every gradient 0.
    """
    optimizer, call, parameter = driver(
        mode, 2, 2.0**16, dtype, accumulate_dtype=dtype, master_weights=True
    )
    call(2.0**14)
    call(2.0**14)
    assert optimizer.storage.sums[0].dtype == dtype
    assert parameter.astype(ms.float32).asnumpy().tolist() == [1.0, 0.75, 1.0]


@pytest.mark.parametrize("mode", MODES)
def test_scaled_loss_keeps_its_dtype(mode):
    """2^16 is inf in float16, so that the first window of such a loss overflows; it
    fits into a float32 loss.
    """
    set_mode(mode)
    optimizer = gradaccum.wrap(
        nn.SGD(two_parameters(), 0.5), steps=2, loss_scale=gradaccum.DynamicLossScale()
    )
    scale = ms.jit(optimizer.scale) if mode == "jit" else optimizer.scale
    for dtype, expected in ((ms.float16, np.inf), (ms.float32, 2.0**16)):
        found = scale(Tensor(1.0, dtype))
        assert (found.dtype, found.asnumpy()) == (dtype, expected)
