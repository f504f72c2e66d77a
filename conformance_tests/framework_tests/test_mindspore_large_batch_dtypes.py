"""Dtypes of the large batch: half precision is summed in float32, and ``accumulate_dtype`` asks for wider sums."""

import pytest

ms = pytest.importorskip("mindspore", reason="needs MindSpore")

import numpy as np  # noqa: E402
from mindspore import Parameter, Tensor  # noqa: E402

from conformance_tests.framework_tests.mindspore_common import pynative_after  # noqa: E402, F401
from conformance_tests.framework_tests.mindspore_large_batch import in_mode  # noqa: E402
from gradaccum_mindspore.large_batch.value_and_grad import value_and_grad  # noqa: E402


@pytest.mark.parametrize("mode", ["pynative", "jit"])
@pytest.mark.parametrize("dtype", [ms.float16, ms.bfloat16])
def test_half_precision_sums_in_float32(mode, dtype):
    """2048 + 1 is 2048 in float16, and 256 + 1 is 256 in bfloat16: a sum in that dtype would stay at its first number."""
    weight = Parameter(Tensor(0.0, dtype), name="w")

    def forward(x):
        return (weight.astype(ms.float32) * x).sum()

    large = 2048.0 if dtype == ms.float16 else 256.0
    x = Tensor(np.array([large] + [1.0] * 8), ms.float32)
    _, gradient = in_mode(mode, value_and_grad(forward, None, weight, steps=9, reduction="sum"))(x)
    assert gradient.dtype == dtype
    assert gradient.astype(ms.float32).asnumpy() == large + 8


def test_wider_sums():
    """``accumulate_dtype`` is that of the sums, and the gradient has its own: 1e8 + 1 - 1e8 is 1 in float64."""
    weight = Parameter(Tensor(0.0, ms.float32), name="w")

    def forward(x):
        return (weight * x).sum()

    x = Tensor([1e8, 1.0, -1e8], ms.float32)
    made = (value_and_grad(forward, None, weight, steps=3, reduction="sum", accumulate_dtype=d)(x)[1] for d in (None, "float64"))
    assert [(each.asnumpy().tolist(), each.dtype) for each in made] == [(0.0, ms.float32), (1.0, ms.float32)]
