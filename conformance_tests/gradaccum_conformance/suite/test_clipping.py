"""Clipping and skipping by norm: once per window, on the window's true gradient."""

import pytest

from gradaccum_conformance.bounds import bound_of_sum, gamma, worst
from gradaccum_conformance.harness import Dtype, Harness, Option
from gradaccum_conformance.measuring import Errors
from gradaccum_conformance.scenarios import (
    global_norm,
    mean_of,
    random_tree,
    same,
    start,
)
from gradaccum_conformance.specs import LINEAR

SEEDS = (0, 1, 2)
TREES = [random_tree(LINEAR, seed) for seed in SEEDS]
TRUE = mean_of(TREES)
NORM = global_norm(TRUE)
ELEMENTS = sum(array.size for array in TRUE.values())


def bound(dtype: Dtype) -> float:
    """Return the bound of the sum, plus that of a sum of squares over all elements."""
    return bound_of_sum(TREES, dtype) + gamma(2 * ELEMENTS, dtype)


BOUND = bound("float32")


def run(backend: Harness, scale: float = 1.0, **options: Option):
    session = start(backend, steps=len(SEEDS), **options)
    for seed in SEEDS:
        session.gradients(random_tree(LINEAR, seed, scale))
    return session


def test_norm_is_reported(backend: Harness, mode: str, errors: Errors) -> None:
    session = run(backend, mode=mode)
    errors.check("norm", abs(session.result().grad_norm - NORM) / NORM, BOUND)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_gradient_is_clipped_to_limit(
    backend: Harness, mode: str, errors: Errors, reduction: str
) -> None:
    """The result reports the norm before clipping."""
    factor = 1.0 if reduction == "mean" else len(SEEDS)
    limit = NORM * factor / 4
    session = run(backend, clip_norm=limit, reduction=reduction, mode=mode)
    clipped = {name: array / 4 * factor for name, array in TRUE.items()}
    errors.check(
        "clipped gradient", worst(session.captured().gradient or {}, clipped), BOUND
    )
    errors.check(
        "norm before clipping",
        abs(session.result().grad_norm - NORM * factor) / (NORM * factor),
        BOUND,
    )


def test_only_the_window_is_clipped(backend: Harness, errors: Errors) -> None:
    """Two opposite gradients are each far above the limit, and their sum is small.
    Clipping either would change the sum.
    """
    session = start(backend, steps=2, clip_norm=1.0)
    big, small = random_tree(LINEAR, 0, 8.0), random_tree(LINEAR, 1, 2.0**-4)
    session.gradients(big)
    opposite = {name: small[name] - big[name] for name in big}
    session.gradients(opposite)
    expected = {name: array / 2 for name, array in small.items()}
    errors.check(
        "gradient",
        worst(session.captured().gradient or {}, expected),
        bound_of_sum([big, opposite], "float32"),
    )


def test_norm_below_limit_changes_nothing(backend: Harness) -> None:
    assert same(
        run(backend, clip_norm=10 * NORM).parameters(), run(backend).parameters()
    )


def test_norm_above_skip_norm_skips(backend: Harness, mode: str) -> None:
    session = run(backend, skip_norm=NORM / 2, mode=mode)
    result, state = session.result(), session.state()
    assert (result.applied, result.skipped, result.overflow) == (False, True, False)
    assert (session.captured().calls, state.optimizer_step, state.skipped_windows) == (
        0,
        0,
        1,
    )
    assert all(not array.any() for array in session.accumulator().values()), (
        "the skipped window was not cleared"
    )


def test_norm_below_skip_norm_updates(backend: Harness) -> None:
    assert run(backend, skip_norm=NORM * 2).captured().calls == 1


def test_skip_and_clip_are_independent(backend: Harness, errors: Errors) -> None:
    """The norm of float64 sums is float64 too."""
    session = run(backend, skip_norm=NORM * 2, clip_norm=NORM / 2, dtype="float64")
    halved = {name: array / 2 for name, array in TRUE.items()}
    errors.check(
        "clipped gradient",
        worst(session.captured().gradient or {}, halved),
        bound("float64"),
    )


@pytest.mark.parametrize("options", [{}, {"clip_norm": 1.0}], ids=["plain", "clipped"])
def test_large_finite_gradients_are_no_overflow(
    backend: Harness, mode: str, errors: Errors, options: dict[str, Option]
) -> None:
    """Their squares leave float32's range; they themselves do not."""
    session = run(backend, scale=2.0**66, mode=mode, **options)
    result = session.result()
    assert (result.applied, result.overflow) == (True, False)
    errors.check("norm", abs(result.grad_norm / 2.0**66 - NORM) / NORM, BOUND)
    if options:
        unit = {name: array / NORM for name, array in TRUE.items()}
        errors.check(
            "clipped gradient", worst(session.captured().gradient or {}, unit), BOUND
        )
