"""The dtype of the sum: the gradient's own, or `accumulate_dtype`."""

import pytest

from gradaccum_conformance.bounds import FLOAT64_RELATIVE, worst
from gradaccum_conformance.harness import Dtype, Harness
from gradaccum_conformance.measuring import Errors
from gradaccum_conformance.scenarios import (
    constant_tree,
    elements_of,
    feed_gradients,
    outcome_of,
    random_tree,
    same,
    start,
    window_gradient,
)
from gradaccum_conformance.specs import LINEAR


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_sum_has_the_gradients_dtype(backend: Harness, dtype: Dtype) -> None:
    session = start(backend, steps=3, dtype=dtype)
    session.gradients(random_tree(LINEAR, 0))
    for arrays in (session.accumulator(), session.parameters()):
        assert {array.dtype.name for array in arrays.values()} == {dtype}


def test_float64_stays_float64(backend: Harness, errors: Errors) -> None:
    """Terms of size 1 and 2^-40: a float32 anywhere on the way would lose the small
    one.
    """
    session = start(backend, steps=2, dtype="float64")
    trees = [random_tree(LINEAR, 0), random_tree(LINEAR, 1, 2.0**-40)]
    feed_gradients(session, trees)
    gradient = session.captured().gradient
    errors.check("gradient", worst(gradient, window_gradient(trees)), FLOAT64_RELATIVE)


def test_float64_sum_that_float32_cannot_hold_overflows(backend: Harness) -> None:
    session = start(backend, steps=2, accumulate_dtype="float64", reduction="sum")
    before = session.parameters()
    feed_gradients(session, [constant_tree(LINEAR, 3e38)] * 2)
    assert outcome_of(session.result()) == {"skipped", "overflow"}
    assert same(session.parameters(), before)


def test_float64_sum_of_float32_gradients(backend: Harness) -> None:
    """1 + 2^-30 - 1: only a float64 accumulator still holds the small term at the
    end.
    """
    session = start(backend, steps=3, accumulate_dtype="float64", reduction="sum")
    feed_gradients(
        session, [constant_tree(LINEAR, value) for value in (1.0, 2.0**-30, -1.0)]
    )
    assert elements_of(session.captured().gradient) == {2.0**-30}
