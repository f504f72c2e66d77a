"""The dtype of the sum: the gradient's own, or `accumulate_dtype`."""

import numpy as np
import pytest

from gradaccum_conformance.bounds import FLOAT64_RELATIVE, worst
from gradaccum_conformance.harness import Dtype, Harness
from gradaccum_conformance.measuring import Errors
from gradaccum_conformance.scenarios import mean_of, random_tree, same, start
from gradaccum_conformance.specs import LINEAR


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_sum_has_the_gradients_dtype(backend: Harness, dtype: Dtype) -> None:
    session = start(backend, steps=3, dtype=dtype)
    session.gradients(random_tree(LINEAR, 0))
    assert {array.dtype.name for array in session.accumulator().values()} == {dtype}
    assert {array.dtype.name for array in session.parameters().values()} == {dtype}


def test_float64_stays_float64(backend: Harness, errors: Errors) -> None:
    """Terms of size 1 and 2^-40: a float32 anywhere on the way would lose the small
    one.
    """
    session = start(backend, steps=2, dtype="float64")
    trees = [random_tree(LINEAR, 0), random_tree(LINEAR, 1, 2.0**-40)]
    for tree in trees:
        session.gradients(tree)
    errors.check(
        "gradient",
        worst(session.captured().gradient or {}, mean_of(trees)),
        FLOAT64_RELATIVE,
    )


def test_float64_sum_that_float32_cannot_hold_overflows(backend: Harness) -> None:
    session = start(backend, steps=2, accumulate_dtype="float64", reduction="sum")
    before = session.parameters()
    for _ in range(2):
        session.gradients(
            {
                name: np.full(shape, 3e38)
                for name, shape in LINEAR.parameter_shapes().items()
            }
        )
    assert (session.result().applied, session.result().overflow) == (False, True)
    assert same(session.parameters(), before)


def test_float64_sum_of_float32_gradients(backend: Harness) -> None:
    """1 + 2^-30 - 1: only a float64 accumulator still holds the small term at the
    end.
    """
    session = start(backend, steps=3, accumulate_dtype="float64", reduction="sum")
    ones = {name: np.ones(shape) for name, shape in LINEAR.parameter_shapes().items()}
    for factor in (1.0, 2.0**-30, -1.0):
        session.gradients({name: factor * one for name, one in ones.items()})
    gradient = session.captured().gradient
    assert gradient is not None
    assert {float(x) for array in gradient.values() for x in array.flat} == {2.0**-30}
