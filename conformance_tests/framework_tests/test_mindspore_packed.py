"""MindSpore's compiled norm, which measures many small sums as one: right whatever
their number, sizes and elements.
"""

import math
from itertools import product

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops

from conformance_tests.framework_tests.mindspore_common import (
    pynative_after,  # noqa: F401
    set_mode,
)
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
    "beside large ones": [(3,), (130, 130), (2, 2), (SMALL + 1,), (2 * ROW, 2)],
}


def norm_of(arrays):
    return math.sqrt(
        math.fsum(float(x) ** 2 for array in arrays for x in array.ravel())
    )


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
    measures = Measures(sums, ms.float32)
    plain, right, robust, _ = measures()
    assert right
    for norm in (plain, robust):
        assert norm.asnumpy().item() == pytest.approx(norm_of(arrays), rel=3e-7)
    for place, element in product(range(len(sums)), (math.inf, math.nan, 1e30, 1e-30)):
        for other, array in zip(sums, arrays, strict=True):
            ops.assign(
                other, Tensor(np.zeros_like(array) if element == 1e-30 else array)
            )
        changed = sums[place].asnumpy().copy()
        changed.flat[-1] = element
        ops.assign(sums[place], Tensor(changed))
        _, right, robust, finite = measures()
        assert not right, "the plain squares overflow or vanish"
        assert bool(finite) == math.isfinite(element)
        if finite:
            assert robust.asnumpy().item() == pytest.approx(element, rel=3e-7)


@pytest.mark.parametrize(
    ("value", "finite"), [(1e30, True), (math.inf, False), (math.nan, False)]
)
def test_one_element_in_many_is_seen(way, value, finite):
    """Its square overflows, or it is bad."""
    for place in (0, 12_999):
        values = np.ones(13_000, np.float32)
        values[place] = value
        norm, found = measure([Tensor(values)], ms.float32)
        assert found == gradient_sum.all_finite(Tensor(values)) == finite
        assert not finite or norm == pytest.approx(value, rel=1e-6)


def test_squares_of_two_tensors_may_overflow_together(way):
    norm, finite = measure([Tensor(np.full(1, 1.2e154)) for _ in range(2)], ms.float64)
    assert (norm, finite) == (pytest.approx(1.2e154 * 2**0.5), True)


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
