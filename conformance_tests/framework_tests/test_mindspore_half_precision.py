"""Half precision in MindSpore: which sums and losses float16 can hold, and which
overflow.
"""

import mindspore as ms
import pytest

from .mindspore_common import (
    BFLOAT16,
    by_mode,
    pynative_after,  # noqa: F401
)
from .mindspore_driver import driver


@by_mode
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
    optimizer, call, _ = driver("pynative", 2, 0.5, ms.float16, reduction="sum")
    call(32752.0)
    call(8.0)
    assert optimizer.result.overflow


def test_largest_float32_is_no_overflow():
    optimizer, call, _ = driver("pynative", 1)
    call(3.4028234663852886e38)
    assert optimizer.result.applied
