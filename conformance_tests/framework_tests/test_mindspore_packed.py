"""MindSpore's compiled norm, which measures many small sums as one: right whatever
their number, sizes and elements.
"""

import math
import sys

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops

import gradaccum
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
    "one": [(3,)],
    "within a row": [(3,), (5, 7), ()],
    "a prime number": [(61, 67), (16,)],
    "whole rows": [(64, 64), (64, 64)],
    "beside large ones": [(3,), (130, 130), (2, 2), (SMALL + 1,)],
    "large alone": [(SMALL + 1,), (130, 130)],
}


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
    random = np.random.default_rng(len(shapes))
    return [np.asarray(1.5 * random.standard_normal(shape), dtype) for shape in shapes]


def true_norm(arrays):
    return math.sqrt(
        math.fsum(float(x) ** 2 for array in arrays for x in array.ravel())
    )


@pytest.mark.parametrize(
    "dtypes",
    [("float32",), ("float16", "float32"), ("float32", "float64")],
    ids="-".join,
)
@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
def test_norms_are_accurate(shapes, dtypes):
    arrays = [
        array.astype(dtypes[place % len(dtypes)])
        for place, array in enumerate(values_of(shapes, "float64"))
    ]
    sums = [
        Parameter(Tensor(array), name=f"sum{place}")
        for place, array in enumerate(arrays)
    ]
    plain, right, robust, finite = Measures(
        sums, ms.float64 if "float64" in dtypes else ms.float32
    )()
    assert right
    assert finite
    for norm in (plain, robust):
        assert norm.asnumpy().item() == pytest.approx(true_norm(arrays), rel=3e-7)


@pytest.mark.parametrize(
    "shapes",
    [SHAPES["a prime number"], SHAPES["beside large ones"]],
    ids=["joined", "beside large ones"],
)
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
    for total, array in zip(sums, arrays, strict=True):
        for element in (math.inf, math.nan, 1e30, 1e-30):
            changed = array.copy() if element != 1e-30 else np.zeros_like(array)
            changed.flat[-1] = element
            for other, own in zip(sums, arrays, strict=True):
                ops.assign(
                    other, Tensor(np.zeros_like(own) if element == 1e-30 else own)
                )
            ops.assign(total, Tensor(changed))
            _, right, robust, finite = measures()
            assert not right, "the plain squares overflow or vanish"
            assert bool(finite) == math.isfinite(element)
            if finite:
                assert robust.asnumpy().item() == pytest.approx(element, rel=3e-7)
    set_mode("pynative")


def test_large_sums_are_not_copied():
    sums = [
        Parameter(Tensor(np.ones(size, np.float32)), name=f"sum{size}")
        for size in (2, 3, SMALL, SMALL + 1)
    ]
    joined, large = PackedSums(sums, ms.float32)()
    assert large is sums[-1]
    assert joined.shape == (SMALL // ROW + 1, ROW), "the rest of the last row is zeros"
    assert joined.asnumpy().sum() == SMALL + 5


def test_large_sums_have_rows():
    """Those whose last axis is no row are copied: MindSpore's sum over all axes takes
    seven times as long.
    """
    shapes = {
        (ROW,): False,
        (ROW + 1,): True,
        (130, 130): False,
        (2 * ROW, 2): True,
        (2, 2 * ROW): True,
        (ROW, 32): False,
    }
    assert {shape: gradient_sum.needs_rows(shape) for shape in shapes} == shapes
    assert [gradient_sum.row_length(size) for size in (2 * ROW, 2 * 4099, 13_000)] == [
        ROW,
        2,
        3250,
    ]


def test_joined_sums_have_a_limit(monkeypatch):
    monkeypatch.setattr(gradient_sum, "PACKED", 12)
    totals = [
        Parameter(Tensor(np.full(size, place, np.float32)), name=f"sum{place}")
        for place, size in enumerate((9, 4, 8, 3))
    ]
    joined, *others = PackedSums(totals, ms.float32)()
    assert joined.asnumpy().tolist() == [3.0] * 3 + [1.0] * 4, (
        "the smallest that are together within the limit"
    )
    assert others == [totals[0], totals[2]]


SUM_SHAPES = ((), (7,), (3, 5), (130, 100))


"""The last has more elements than a row of the norm, and not a multiple of it."""


DTYPES = ("float16", "float32", "float64")


WORK = {"float16": "float32", "float32": "float32", "float64": "float64"}


@pytest.fixture(params=["NumPy", "operators"])
def way(request, monkeypatch):
    """Runs the test by NumPy, as on a CPU, and by MindSpore's operators, as on other
    devices.
    """
    if request.param == "operators":
        monkeypatch.setattr(gradient_sum, "array_of", lambda tensor: None)


def arrays(dtype):
    random = np.random.default_rng(0)
    return [np.asarray(random.standard_normal(shape), dtype) for shape in SUM_SHAPES]


def tensors(dtype):
    return [Tensor(array) for array in arrays(dtype)]


@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_is_accurate(way, dtype):
    norm, finite = measure(tensors(dtype), getattr(ms, WORK[dtype]))
    true = math.sqrt(
        math.fsum(float(x) ** 2 for array in arrays(dtype) for x in array.ravel())
    )
    assert finite
    assert norm == pytest.approx(true, rel=1e-12 if dtype == "float64" else 3e-7)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("position", [0, 5000, 12_999])
def test_one_bad_element_is_found(way, bad, position):
    values = np.ones(13_000, np.float32)
    values[position] = bad
    assert not measure([Tensor(values)], ms.float32)[1]
    assert not gradient_sum.all_finite(Tensor(values))
    assert gradient_sum.all_finite(Tensor(np.ones(3, np.float32)))


def test_norm_survives_overflowing_squares(way):
    norm, finite = measure([Tensor(np.full((5000,), 1e30, np.float32))], ms.float32)
    assert finite
    assert norm == pytest.approx(1e30 * math.sqrt(5000), rel=1e-6)


@pytest.mark.parametrize("total", DTYPES)
@pytest.mark.parametrize("handed", DTYPES)
@pytest.mark.parametrize("divisor", [8.0, 3.0])
def test_division_is_rounded_once(way, total, handed, divisor):
    """In the sum's dtype, or in float32 for a float16 sum."""
    float_dtype = ms.float64 if total == "float64" else ms.float32
    found = gradient_sum.divided(
        tensors(total), divisor, [getattr(ms, handed)] * len(SUM_SHAPES), float_dtype
    )
    work = np.dtype(WORK[total])
    for tensor, array in zip(found, arrays(total), strict=True):
        assert tensor.dtype == getattr(ms, handed)
        np.testing.assert_array_equal(
            tensor.asnumpy(), (array.astype(work) / work.type(divisor)).astype(handed)
        )


@pytest.mark.parametrize("own", DTYPES)
@pytest.mark.parametrize("total", DTYPES)
@pytest.mark.parametrize("factor", [1.0, 0.3])
def test_scaling_rounds_to_the_sums_dtype(way, own, total, factor):
    work = np.dtype(WORK[total])
    for tensor, array in zip(tensors(own), arrays(own), strict=True):
        found = gradient_sum.scaled(tensor, factor, getattr(ms, total))
        assert found.dtype == getattr(ms, total)
        np.testing.assert_array_equal(
            found.asnumpy(), (array.astype(work) * work.type(factor)).astype(total)
        )


def test_bfloat16_is_left_to_operators():
    half = Tensor(np.array([1.0, 3.0], np.float32)).astype(ms.bfloat16)
    assert gradient_sum.array_of(half) is None
    (found,) = gradient_sum.divided(
        [Tensor(np.array([2.0], np.float32))], 4.0, [ms.bfloat16], ms.float32
    )
    assert found.dtype == ms.bfloat16
    assert found.astype(ms.float32).asnumpy() == [0.5]
    np.testing.assert_array_equal(
        gradient_sum.scaled(half, 0.5, ms.float32).asnumpy(), [0.5, 1.5]
    )


class Nothing(nn.Optimizer):
    """An optimizer that changes no parameter, so that only the window's own work is
    counted.
    """

    def construct(self, gradients):
        return True


def handed_over(run):
    """The names of the operators that `run` hands to another thread, and the result of
    `run`.
    """
    names = []

    def note(frame, event, called):
        if event == "c_call" and called.__name__.startswith("pyboost_"):
            names.append(called.__name__)

    sys.setprofile(note)
    try:
        result = run()
    finally:
        sys.setprofile(None)
    return names, result


def test_queued_operators_are_seen():
    """If none were seen, the test below could not fail."""
    tensor = Tensor(np.ones(3, np.float32))
    assert handed_over(lambda: ops.square(tensor))[0]


@pytest.mark.parametrize("weight", [None, 3])
def test_window_queues_no_operator(weight):
    """MindSpore hands most operators to another thread, and waiting for it takes tenths
    of a millisecond.
    """
    parameters = [
        Parameter(Tensor(array), name=f"p{i}")
        for i, array in enumerate(arrays("float32"))
    ]
    optimizer = gradaccum.wrap(Nothing(0.1, parameters), steps=2)
    gradients = tuple(tensors("float32"))
    optimizer(gradients, weight)
    optimizer(gradients, weight)
    handed, closed = handed_over(
        lambda: [optimizer(gradients, weight) for _ in range(2)]
    )
    assert closed == [False, True]
    assert not handed
