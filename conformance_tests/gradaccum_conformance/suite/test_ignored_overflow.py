"""``on_overflow="ignore"``: nothing looks at the gradients unless an option asks, and
what is there is applied.
"""

from __future__ import annotations

import math

import numpy as np
import pytest

from gradaccum_conformance.bounds import bound_of_sum, gamma, worst
from gradaccum_conformance.harness import Harness, Option
from gradaccum_conformance.measuring import Errors
from gradaccum_conformance.scenarios import (
    global_norm,
    mean_of,
    poisoned,
    random_tree,
    same,
    start,
)
from gradaccum_conformance.specs import LINEAR

TREES = [random_tree(LINEAR, seed) for seed in (0, 1, 2)]
NORM = global_norm(mean_of(TREES))
BOUND = bound_of_sum(TREES, "float32") + gamma(64, "float32")


def run(backend: Harness, bad: float | None = None, **options: Option):
    session = start(backend, steps=len(TREES), on_overflow="ignore", **options)
    for index, tree in enumerate(TREES):
        session.gradients(tree if bad is None or index else poisoned(tree, bad))
    return session


def test_clean_window_is_as_always(backend: Harness, mode: str, errors: Errors) -> None:
    session = run(backend, mode=mode)
    result = session.result()
    assert (result.applied, result.skipped, result.overflow) == (True, False, False)
    assert math.isnan(result.grad_norm), "nothing asked for the norm"
    errors.check(
        "gradient", worst(session.captured().gradient or {}, mean_of(TREES)), BOUND
    )
    assert all(not array.any() for array in session.accumulator().values()), (
        "the window was not cleared"
    )


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_bad_gradient_is_applied(backend: Harness, mode: str, bad: float) -> None:
    """As a bare optimizer applies it: the poisoned element is not finite, every other
    one is right. The next window is clean.
    """
    session, clean = run(backend, bad, mode=mode), run(backend, mode=mode)
    assert session.state().optimizer_step == 1
    for name, array in session.parameters().items():
        finite = np.isfinite(array)
        assert finite.sum() == array.size - (name == list(session.parameters())[-1])
        np.testing.assert_array_equal(array[finite], clean.parameters()[name][finite])
    for each in (session, clean):
        each.gradients(TREES[0])
        each.flush()
    assert same(session.captured().gradient or {}, clean.captured().gradient or {}), (
        "the bad window left a trace"
    )


def test_limits_measure_the_norm(backend: Harness, mode: str, errors: Errors) -> None:
    clipped = run(backend, clip_norm=NORM / 4, mode=mode)
    errors.check("norm", abs(clipped.result().grad_norm - NORM) / NORM, BOUND)
    expected = {name: array / 4 for name, array in mean_of(TREES).items()}
    errors.check(
        "clipped gradient", worst(clipped.captured().gradient or {}, expected), BOUND
    )
    skipped = run(backend, skip_norm=NORM / 2, mode=mode)
    assert (skipped.result().skipped, skipped.captured().calls) == (True, 0)


def test_limits_meet_a_bad_gradient(backend: Harness, mode: str) -> None:
    """Its norm is above every limit: it is skipped by one, and applied unclipped with
    the other.
    """
    skipped = run(backend, math.inf, skip_norm=NORM, mode=mode)
    assert (
        skipped.result().skipped,
        skipped.result().overflow,
        skipped.captured().calls,
    ) == (True, True, 0)
    clipped, plain = (
        run(backend, math.inf, clip_norm=NORM / 4, mode=mode),
        run(backend, math.inf, mode=mode),
    )
    result = clipped.result()
    assert (result.applied, result.overflow, result.grad_norm) == (True, True, math.inf)
    assert same(clipped.parameters(), plain.parameters())


def test_window_without_weight_makes_no_update(backend: Harness, mode: str) -> None:
    session = start(backend, steps=2, on_overflow="ignore", mode=mode)
    before = session.parameters()
    for tree in TREES[:2]:
        session.gradients(poisoned(tree, math.nan), weight=0.0)
    assert (session.result().skipped, session.captured().calls) == (True, 0)
    assert same(session.parameters(), before)


def test_fixed_loss_scale_is_divided_out(
    backend: Harness, mode: str, errors: Errors
) -> None:
    session = run(backend, loss_scale=8.0, mode=mode)
    errors.check(
        "gradient", worst(session.captured().gradient or {}, mean_of(TREES)), BOUND
    )
