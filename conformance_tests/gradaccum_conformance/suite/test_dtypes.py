"""The dtype of the sum: the gradient's own, or `accumulate_dtype`."""

import pytest

from gradaccum_conformance.harness import Dtype, Harness
from gradaccum_conformance.scenarios import (
    constant_tree,
    elements_of,
    feed_gradients,
    random_tree,
    require_skipped,
    start,
)
from gradaccum_conformance.specs import LINEAR


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_sum_has_the_gradients_dtype(backend: Harness, dtype: Dtype) -> None:
    session = start(backend, steps=3, dtype=dtype)
    session.gradients(random_tree(LINEAR, 0))
    for arrays in (session.accumulator(), session.parameters()):
        assert {array.dtype.name for array in arrays.values()} == {dtype}


def test_float64_sum_that_float32_cannot_hold_overflows(backend: Harness) -> None:
    session = start(backend, steps=2, accumulate_dtype="float64", reduction="sum")
    before = session.parameters()
    feed_gradients(session, [constant_tree(LINEAR, 3e38)] * 2)
    require_skipped(session, before, "overflow")


def test_float64_sum_of_float32_gradients(backend: Harness) -> None:
    """1 + 2^-30 - 1: only a float64 accumulator still holds the small term at the
    end.
    """
    session = start(backend, steps=3, accumulate_dtype="float64", reduction="sum")
    feed_gradients(
        session, [constant_tree(LINEAR, value) for value in (1.0, 2.0**-30, -1.0)]
    )
    assert elements_of(session.captured().gradient) == {2.0**-30}
