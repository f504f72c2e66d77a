"""``on_overflow="ignore"``: nothing looks at the gradients unless an option asks, and
what is there is applied.
"""

import math

import numpy as np
import pytest

from gradaccum_conformance.bounds import bound_of_sum, gamma, worst
from gradaccum_conformance.harness import Harness, Option, Session
from gradaccum_conformance.measuring import Errors
from gradaccum_conformance.scenarios import (
    feed_gradients,
    global_norm,
    outcome_of,
    poisoned,
    random_tree,
    same,
    start,
    window_gradient,
)
from gradaccum_conformance.specs import LINEAR

TREES = [random_tree(LINEAR, seed) for seed in (0, 1, 2)]
GRADIENT = window_gradient(TREES)
NORM = global_norm(GRADIENT)
BOUND = bound_of_sum(TREES, "float32") + gamma(64, "float32")


def run(backend: Harness, bad: float | None = None, **options: Option) -> Session:
    session = start(backend, steps=3, on_overflow="ignore", **options)
    first = TREES[0] if bad is None else poisoned(TREES[0], bad)
    feed_gradients(session, [first, *TREES[1:]])
    return session


@pytest.mark.parametrize("loss_scale", [None, 8.0])
def test_clean_window_is_as_always(
    backend: Harness, mode: str, errors: Errors, loss_scale: Option
) -> None:
    """Nothing asked for the norm. A fixed loss scale is divided out."""
    session = run(backend, mode=mode, loss_scale=loss_scale)
    assert outcome_of(session.result()) == {"applied"}
    assert math.isnan(session.result().grad_norm)
    errors.check("gradient", worst(session.captured().gradient, GRADIENT), BOUND)
    assert all(not array.any() for array in session.accumulator().values())


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_bad_gradient_is_applied(backend: Harness, mode: str, bad: float) -> None:
    """As a bare optimizer applies it: the poisoned element is not finite, every other
    one is right. The next window is clean.
    """
    session = run(backend, bad, mode=mode)
    clean = run(backend, mode=mode)
    assert session.state().optimizer_step == 1
    for name, array in session.parameters().items():
        finite = np.isfinite(array)
        assert finite.sum() == array.size - (name == list(session.parameters())[-1])
        np.testing.assert_array_equal(array[finite], clean.parameters()[name][finite])
    for each in (session, clean):
        each.gradients(TREES[0])
        each.flush()
    assert same(session.captured().gradient, clean.captured().gradient)


def test_limits_measure_the_norm(backend: Harness, mode: str, errors: Errors) -> None:
    clipped = run(backend, clip_norm=NORM / 4, mode=mode)
    errors.check("norm", abs(clipped.result().grad_norm - NORM) / NORM, BOUND)
    expected = {name: array / 4 for name, array in GRADIENT.items()}
    errors.check(
        "clipped gradient", worst(clipped.captured().gradient, expected), BOUND
    )
    skipped = run(backend, skip_norm=NORM / 2, mode=mode)
    assert outcome_of(skipped.result()) == {"skipped"}


def test_limits_meet_a_bad_gradient(backend: Harness, mode: str) -> None:
    """Its norm is above every limit: it is skipped by one, and applied unclipped with
    the other.
    """
    skipped = run(backend, math.inf, skip_norm=NORM, mode=mode)
    assert outcome_of(skipped.result()) == {"skipped", "overflow"}
    assert skipped.captured().calls == 0
    clipped = run(backend, math.inf, clip_norm=NORM / 4, mode=mode)
    assert outcome_of(clipped.result()) == {"applied", "overflow"}
    assert clipped.result().grad_norm == math.inf
    plain = run(backend, math.inf, mode=mode)
    assert same(clipped.parameters(), plain.parameters())
