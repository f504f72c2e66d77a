"""Half precision in MindSpore: which sums and losses float16 can hold, and which
overflow.
"""

import mindspore as ms
import pytest
from mindspore import Parameter, Tensor, nn

import gradaccum
from conformance_tests.framework_tests.mindspore_common import (
    BFLOAT16,
    MODES,
    pynative_after,  # noqa: F401
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


def test_single_element_beyond_float16_overflows():
    """The sum is half of 65520, which float16 holds. Divided by the scale it is not."""
    parameter = Parameter(Tensor([1.0], ms.float16), name="p")
    inner = nn.SGD([parameter], 1.0)
    optimizer = gradaccum.wrap(inner, steps=2, reduction="sum", loss_scale=0.5)
    optimizer.scale(Tensor(1.0))
    for value in (32752.0, 8.0):
        optimizer((Tensor([value], ms.float16),))
    assert optimizer.result.overflow
