"""MindSpore's compiled norm, which measures many small sums as one: right whatever
their number, sizes and elements.
"""

import math
from itertools import product

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops

from conformance_tests.framework_tests.mindspore_common import set_mode
from gradaccum_mindspore import gradient_sum
from gradaccum_mindspore.gradient_sum import (
    ROW,
    SMALL,
    PackedSums,
    compiled_measure,
    measure,
    robust_measure,
)

SHAPES = {
    "within a row": [(3,), (5, 7), ()],
    "a prime number": [(61, 67), (16,)],
    "beside large ones": [(3,), (130, 130), (2, 2), (SMALL + 1,)],
    "large alone": [(SMALL + 1,), (2 * ROW, 2)],
}


def norm_of(arrays):
    return math.sqrt(
        math.fsum(float(x) ** 2 for array in arrays for x in array.ravel())
    )


@pytest.mark.parametrize(
    "dtypes", [("float16", "float32"), ("float32", "float64")], ids="-".join
)
@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
def test_compiled_norms_are_accurate(shapes, dtypes):
    arrays = [
        array.astype(dtypes[place % 2])
        for place, array in enumerate(values_of(shapes, "float64"))
    ]
    sums = [
        Parameter(Tensor(array), name=f"sum{place}")
        for place, array in enumerate(arrays)
    ]
    plain, right, robust, finite = Measures(sums, getattr(ms, dtypes[1]))()
    assert right
    assert finite
    for norm in (plain, robust):
        assert norm.asnumpy().item() == pytest.approx(norm_of(arrays), rel=3e-7)


class Measures(nn.Cell):
    """Both norms of the same sums."""

    def __init__(self, sums, dtype):
        super().__init__(auto_prefix=False)
        self.packed, self.dtype = PackedSums(sums, dtype), dtype

    def construct(self):
        plain, right = compiled_measure(self.packed(), self.dtype)
        robust, finite = robust_measure(self.packed(), self.dtype)
        return plain, right, robust, finite


def values_of(shapes, dtype):
    random = np.random.default_rng(0)
    return [np.asarray(random.standard_normal(shape), dtype) for shape in shapes]


@pytest.mark.parametrize("kind", ["a prime number", "beside large ones"])
def test_each_sum_is_seen_in_graph_mode(kind):
    """One program, and one element of each sum in turn: bad, huge, or the only one that
    is not 0.
    """
    arrays = values_of(SHAPES[kind], "float32")
    sums = [
        Parameter(Tensor(array), name=f"sum{place}")
        for place, array in enumerate(arrays)
    ]
    set_mode("graph")
    measures = Measures(sums, ms.float32)
    for place, element in product(range(len(sums)), (math.inf, math.nan, 1e30, 1e-30)):
        for other, array in zip(sums, arrays, strict=True):
            ops.assign(other, Tensor(array if element != 1e-30 else 0 * array))
        changed = sums[place].asnumpy().copy()
        changed.flat[-1] = element
        ops.assign(sums[place], Tensor(changed))
        _, right, robust, finite = measures()
        assert not right, "the plain squares overflow or vanish"
        assert bool(finite) == math.isfinite(element)
        if finite:
            assert robust.asnumpy().item() == pytest.approx(element, rel=3e-7)
    set_mode("pynative")


SUM_SHAPES = ((), (7,), (3, 5), (130, 100))
"""The last has more elements than a row of the norm, and not a multiple of it."""


WORK = {"float16": "float32", "float32": "float32", "float64": "float64"}


@pytest.fixture(params=["NumPy", "operators"])
def way(request, monkeypatch):
    """Runs the test by NumPy, as on a CPU, and by MindSpore's operators, as on other
    devices.
    """
    if request.param == "operators":
        monkeypatch.setattr(gradient_sum, "array_of", lambda tensor: None)


def tensors(arrays):
    return [Tensor(array) for array in arrays]


@pytest.mark.parametrize("dtype", WORK)
def test_norm_is_accurate(way, dtype):
    arrays = values_of(SUM_SHAPES, dtype)
    norm, finite = measure(tensors(arrays), getattr(ms, WORK[dtype]))
    assert finite
    bound = 1e-12 if dtype == "float64" else 3e-7
    assert norm == pytest.approx(norm_of(arrays), rel=bound)


@pytest.mark.parametrize("bad", [math.inf, math.nan])
@pytest.mark.parametrize("position", [0, 12_999])
def test_one_bad_element_is_found(way, bad, position):
    values = np.ones(13_000, np.float32)
    values[position] = bad
    assert not measure([Tensor(values)], ms.float32)[1]
    assert not gradient_sum.all_finite(Tensor(values))
    assert gradient_sum.all_finite(Tensor(np.ones(3, np.float32)))


@pytest.mark.parametrize(
    ("dtype", "value", "tensors"), [("float32", 1e30, 1), ("float64", 1.2e154, 2)]
)
def test_norm_survives_overflowing_squares(way, dtype, value, tensors):
    """Those of two tensors may overflow together alone."""
    sums = [Tensor(np.full(5000, value, dtype)) for _ in range(tensors)]
    norm, finite = measure(sums, getattr(ms, dtype))
    assert finite
    assert norm == pytest.approx(value * math.sqrt(5000 * tensors), rel=1e-6)


@pytest.mark.parametrize("total", WORK)
@pytest.mark.parametrize("other", WORK)
def test_division_and_scaling_are_rounded_once(way, total, other):
    """In the sum's dtype, or in float32 for a float16 sum."""
    work = np.dtype(WORK[total])
    arrays = values_of(SUM_SHAPES, total)
    handed = [getattr(ms, other)] * len(arrays)
    divided = gradient_sum.divided(
        tensors(arrays), 3.0, handed, getattr(ms, WORK[total])
    )
    for tensor, array in zip(divided, arrays, strict=True):
        expected = (array.astype(work) / work.type(3)).astype(other)
        np.testing.assert_array_equal(tensor.asnumpy(), expected, strict=True)
        scaled = gradient_sum.scaled(Tensor(array), 0.3, getattr(ms, other))
        wide = np.dtype(WORK[other])
        expected = (array.astype(wide) * wide.type(0.3)).astype(other)
        np.testing.assert_array_equal(scaled.asnumpy(), expected, strict=True)


def test_bfloat16_is_left_to_operators():
    half = Tensor(np.array([1.0, 3.0], np.float32)).astype(ms.bfloat16)
    (found,) = gradient_sum.divided([half], 4.0, [ms.bfloat16], ms.float32)
    assert found.dtype == ms.bfloat16
    assert found.astype(ms.float32).asnumpy().tolist() == [0.25, 0.75]
    scaled = gradient_sum.scaled(half, 0.5, ms.float32)
    assert scaled.asnumpy().tolist() == [0.5, 1.5]
