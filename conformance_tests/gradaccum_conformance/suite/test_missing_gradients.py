"""A parameter without a gradient in a micro-batch counts as zero there, and keeps its
sum.
"""

import numpy as np
import pytest

from gradaccum_conformance.bounds import bound_of_sum, relative_errors, unit_roundoff
from gradaccum_conformance.harness import Harness
from gradaccum_conformance.measuring import Errors
from gradaccum_conformance.scenarios import (
    CAPTURE,
    feed_gradients,
    random_tree,
    start,
    terms_of_sum,
    window_gradient,
)
from gradaccum_conformance.specs import MLP

NAMES = tuple(MLP.parameter_shapes())
RATE = CAPTURE.learning_rate


@pytest.mark.parametrize("absent", [(0,), (1,), (2,), (0, 1), (0, 1, 2)], ids=str)
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
    nothing. What counts is how far each parameter moves.
    """
    session = start(backend, MLP, steps=3, mode=mode)
    for window in range(2):
        before = session.parameters()
        zero = np.zeros_like(before[name])
        trees = []
        truth = []
        for index in range(3):
            tree = random_tree(MLP, 3 * window + index)
            trees.append({**tree, name: None} if index in absent else tree)
            truth.append({**tree, name: zero} if index in absent else tree)
        feed_gradients(session, trees)
        assert session.captured().calls == window + 1
        gradient = window_gradient(truth)
        bound = bound_of_sum(terms_of_sum(truth, None, "mean"), "float32")
        after = session.parameters()
        moved = {n: (before[n].astype(np.float64) - after[n]) / RATE for n in after}
        for n, error in relative_errors(moved, gradient).items():
            norm = float(np.linalg.norm(before[n]))
            rounding = 2 * unit_roundoff("float32") * norm / RATE
            size = float(np.linalg.norm(gradient[n])) or 1.0
            errors.check(f"step of {n}", error, 2 * bound + rounding / size)
