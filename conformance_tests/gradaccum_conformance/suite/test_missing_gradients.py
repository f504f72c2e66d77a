"""A parameter without a gradient in a micro-batch counts as zero there, and keeps its
sum.
"""

import numpy as np
import pytest

from gradaccum_conformance.bounds import bound_of_sum, relative_errors, unit_roundoff
from gradaccum_conformance.harness import Harness
from gradaccum_conformance.measuring import Errors
from gradaccum_conformance.scenarios import CAPTURE, mean_of, random_tree, start
from gradaccum_conformance.specs import MLP

MISSING = {
    "first": (0,),
    "last": (2,),
    "middle": (1,),
    "all but one": (0, 1),
    "all": (0, 1, 2),
}
NAMES = tuple(MLP.parameter_shapes())
RATE = CAPTURE.learning_rate


@pytest.mark.parametrize("absent", MISSING.values(), ids=MISSING)
@pytest.mark.parametrize("name", [NAMES[0], NAMES[-1]])
def test_missing_gradient_is_zero(
    backend: Harness, errors: Errors, absent: tuple[int, ...], name: str
) -> None:
    check(backend, errors, absent, name, backend.modes[0])


def test_missing_gradient_in_every_mode(
    backend: Harness, mode: str, errors: Errors
) -> None:
    check(backend, errors, (2,), NAMES[0], mode)


def check(
    backend: Harness, errors: Errors, absent: tuple[int, ...], name: str, mode: str
) -> None:
    """In a first window, and in one after it, into whose sums the first one has left
    nothing.
    """
    session = start(backend, MLP, steps=3, mode=mode)
    for window in range(2):
        before, trees = (
            session.parameters(),
            [random_tree(MLP, 3 * window + index) for index in range(3)],
        )
        for index, tree in enumerate(trees):
            session.gradients({**tree, name: None} if index in absent else tree)
            if index in absent:
                trees[index] = {**tree, name: np.zeros_like(tree[name])}
        assert session.captured().calls == window + 1
        expected, bound = mean_of(trees), bound_of_sum(trees, "float32")
        moved = {
            n: (before[n].astype(np.float64) - p) / RATE
            for n, p in session.parameters().items()
        }
        for n, error in relative_errors(moved, expected).items():
            rounding = (
                2 * unit_roundoff("float32") * float(np.linalg.norm(before[n])) / RATE
            )
            size = float(np.linalg.norm(expected[n])) or 1.0
            errors.check(f"step of {n}", error, 2 * bound + rounding / size)
