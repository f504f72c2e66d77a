"""MindSpore's compiled norm, which measures many small sums as one: right whatever their number, sizes and elements."""

import math

import pytest

ms = pytest.importorskip("mindspore", reason="needs MindSpore")

import numpy as np  # noqa: E402
from mindspore import Parameter, Tensor, nn, ops  # noqa: E402

from conformance_tests.framework_tests.mindspore_common import set_mode  # noqa: E402
from gradaccum_mindspore import sums  # noqa: E402
from gradaccum_mindspore.sums import ROW, SMALL, Packed, compiled_measure, norm_over, robust_measure  # noqa: E402

SHAPES = {
    "one": [(3,)],
    "within a row": [(3,), (5, 7), ()],
    "a prime number": [(61, 67), (16,)],
    "whole rows": [(64, 64), (64, 64)],
    "beside large ones": [(3,), (130, 130), (2, 2), (SMALL + 1,)],
    "large alone": [(SMALL + 1,), (130, 130)],
}


class Measures(nn.Cell):
    """All three norms of the same sums."""

    def __init__(self, sums, dtype):
        super().__init__(auto_prefix=False)
        self.packed, self.dtype = Packed(sums, dtype), dtype
        self.two = Tensor(2.0, dtype)

    def construct(self):
        plain, right = compiled_measure(self.packed(), self.dtype)
        robust, finite = robust_measure(self.packed(), self.dtype)
        return plain, right, robust, finite, norm_over(self.packed(), self.two)


def values_of(shapes, dtype):
    random = np.random.default_rng(len(shapes))
    return [np.asarray(1.5 * random.standard_normal(shape), dtype) for shape in shapes]


def true_norm(arrays):
    return math.sqrt(math.fsum(float(x) ** 2 for array in arrays for x in array.ravel()))


@pytest.mark.parametrize("dtypes", [("float32",), ("float16", "float32"), ("float32", "float64")], ids="-".join)
@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
def test_norms_are_accurate(shapes, dtypes):
    arrays = [array.astype(dtypes[place % len(dtypes)]) for place, array in enumerate(values_of(shapes, "float64"))]
    sums = [Parameter(Tensor(array), name=f"sum{place}") for place, array in enumerate(arrays)]
    plain, right, robust, finite, over = Measures(sums, ms.float64 if "float64" in dtypes else ms.float32)()
    assert right
    assert finite
    for norm in (plain, robust, over):
        assert norm.asnumpy().item() == pytest.approx(true_norm(arrays), rel=3e-7)


@pytest.mark.parametrize("shapes", [SHAPES["a prime number"], SHAPES["beside large ones"]], ids=["joined", "beside large ones"])
def test_each_sum_is_seen_in_graph_mode(shapes):
    """One program, and one element of each sum in turn: bad, huge, or the only one that is not 0."""
    arrays = values_of(shapes, "float32")
    sums = [Parameter(Tensor(array), name=f"sum{place}") for place, array in enumerate(arrays)]
    set_mode("graph")
    measures = Measures(sums, ms.float32)
    for total, array in zip(sums, arrays, strict=True):
        for element in (math.inf, math.nan, 1e30, 1e-30):
            changed = array.copy() if element != 1e-30 else np.zeros_like(array)
            changed.flat[-1] = element
            for other, own in zip(sums, arrays, strict=True):
                ops.assign(other, Tensor(np.zeros_like(own) if element == 1e-30 else own))
            ops.assign(total, Tensor(changed))
            _, right, robust, finite, _ = measures()
            assert not right, "the plain squares overflow or vanish"
            assert bool(finite) == math.isfinite(element)
            if finite:
                assert robust.asnumpy().item() == pytest.approx(element, rel=3e-7)
    set_mode("pynative")


def test_large_sums_are_not_copied():
    sums = [Parameter(Tensor(np.ones(size, np.float32)), name=f"sum{size}") for size in (2, 3, SMALL, SMALL + 1)]
    joined, large = Packed(sums, ms.float32)()
    assert large is sums[-1]
    assert joined.shape == (SMALL // ROW + 1, ROW), "the rest of the last row is zeros"
    assert joined.asnumpy().sum() == SMALL + 5


def test_joined_sums_have_a_limit(monkeypatch):
    monkeypatch.setattr(sums, "JOINED", 12)
    totals = [Parameter(Tensor(np.full(size, place, np.float32)), name=f"sum{place}") for place, size in enumerate((9, 4, 8, 3))]
    joined, *others = Packed(totals, ms.float32)()
    assert joined.asnumpy().tolist() == [3.0] * 3 + [1.0] * 4, "the smallest that are together within the limit"
    assert others == [totals[0], totals[2]]
