"""MindSpore's norm of the sums, compiled and in PyNative: each element is seen, and large
and small ones are measured right.
"""

import math
from itertools import product

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops
from numpy.testing import assert_array_equal

from gradaccum_mindspore import gradient_sum
from gradaccum_mindspore.gradient_sum import CHUNK, LIMITS, ROW, compiled_norm, norm_of

from .mindspore_common import (
    pynative_after,  # noqa: F401
    set_mode,
)
from .mindspore_graphs import saved_graphs

SHAPES = {
    "within a row": [(3,), (5, 7), ()],
    "of many rows": [(130, 130), (2, 2), (2 * ROW, 2)],
    "a large prime number": [(2**20 + 7,), (2 * ROW, 2)],
}


class Norm(nn.Cell):
    def __init__(self, sums, dtype):
        super().__init__(auto_prefix=False)
        self.sums = ms.ParameterTuple(sums)
        self.dtype = dtype

    def construct(self):
        return compiled_norm(self.sums, self.dtype)


def exact_norm(arrays):
    return math.sqrt(
        math.fsum(float(x) ** 2 for array in arrays for x in array.ravel())
    )


def values_of(shapes, dtype):
    random = np.random.default_rng(0)
    return [np.asarray(random.standard_normal(shape), dtype) for shape in shapes]


@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
def test_each_sum_is_seen_in_graph_mode(shapes):
    """One program, and one element of each sum in turn: bad, huge, or the only one that
    is not 0.
    """
    arrays = values_of(shapes, "float32")
    sums = [
        Parameter(Tensor(array), name=f"sum{place}")
        for place, array in enumerate(arrays)
    ]
    set_mode("graph")
    norm = Norm(sums, ms.float32)
    with saved_graphs("graph_build") as texts:
        assert norm().asnumpy().item() == pytest.approx(exact_norm(arrays), rel=1e-6)
    text = "".join(texts)
    assert ("Concat(" in text) == (len(arrays[0]) < 2**20), "a large sum is not copied"
    is_long = arrays[0].size > ROW
    assert ("ArgMaxWithValue(" in text) == is_long, (
        "rows, which take a ninth of the time"
    )
    assert (text.count("ReduceSum(") > 1) == is_long, "rows, and then their sums"
    for place, element in product(range(len(sums)), (math.inf, math.nan, 1e30, 1e-30)):
        for other, array in zip(sums, arrays, strict=True):
            ops.assign(
                other, Tensor(np.zeros_like(array) if element == 1e-30 else array)
            )
        changed = sums[place].asnumpy().copy()
        changed.flat[-1] = element
        ops.assign(sums[place], Tensor(changed))
        found = norm().asnumpy().item()
        assert math.isfinite(found) == math.isfinite(element)
        if math.isfinite(element):
            assert found == pytest.approx(element, rel=3e-7)


@pytest.fixture(params=["NumPy", "operators"])
def way(request, monkeypatch):
    """Runs the test by NumPy, as on a CPU, and by MindSpore's operators, as on other
    devices.
    """
    if request.param == "operators":
        monkeypatch.setattr(gradient_sum, "array_of", lambda tensor: None)
    else:
        monkeypatch.setattr(gradient_sum, "cast", None)


@pytest.mark.parametrize("value", [1e30, math.inf, math.nan])
def test_one_element_in_many_is_seen(way, value):
    assert CHUNK > 2**16, "NumPy adds up a chunk, and Python the chunks"
    for place in (0, CHUNK, CHUNK + 12):
        values = np.ones(CHUNK + 13, np.float32)
        values[place] = value
        norm = norm_of([Tensor(values)], ms.float32)
        assert gradient_sum.all_finite(Tensor(values)) == math.isfinite(value)
        assert math.isfinite(norm) == math.isfinite(value)
        assert not math.isfinite(value) or norm == pytest.approx(value, rel=1e-6)


SUM_SHAPES = ((), (7,), (3, 5), (130, 100))
WORK = {"float16": "float32", "float32": "float32", "float64": "float64"}


@pytest.mark.parametrize("total", WORK)
@pytest.mark.parametrize("other", WORK)
def test_division_and_scaling_are_rounded_once(way, total, other):
    """In the sum's dtype, or in float32 for a float16 sum."""
    work = np.dtype(WORK[total])
    arrays = values_of(SUM_SHAPES, total)
    handed = [getattr(ms, other)] * len(arrays)
    divided = gradient_sum.divided(
        [Tensor(array) for array in arrays], 3.0, handed, getattr(ms, WORK[total])
    )
    for tensor, array in zip(divided, arrays, strict=True):
        expected = (array.astype(work) / work.type(3)).astype(other)
        assert_array_equal(tensor.asnumpy(), expected, strict=True)
        scaled = gradient_sum.scaled(Tensor(array), 0.3, getattr(ms, other))
        wide = np.dtype(WORK[other])
        expected = (array.astype(wide) * wide.type(0.3)).astype(other)
        assert_array_equal(scaled.asnumpy(), expected, strict=True)
    assert gradient_sum.scaled(scaled, 1.0, scaled.dtype) is scaled


def test_limits_of_each_dtype():
    for dtype, (step, smallest) in LIMITS.items():
        given = [1 + step, 1 + step / 2, smallest, smallest / 2]
        rounded = Tensor(given, ms.float64).astype(dtype).astype(ms.float64)
        assert rounded.asnumpy().tolist() == [1 + step, 1, smallest, 0]
        assert 1 + step > 1
