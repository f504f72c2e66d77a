"""Weights: unequal micro-batches count by their items; a weight of 0 adds nothing; a
total of 0 applies no update.
"""

import math

import pytest

from gradaccum_conformance.bounds import bound_of_sum, worst
from gradaccum_conformance.harness import Harness, Option
from gradaccum_conformance.measuring import Errors
from gradaccum_conformance.scenarios import (
    REDUCTIONS,
    feed_gradients,
    poisoned,
    random_tree,
    require_skipped,
    same,
    start,
    terms_of_sum,
    window_gradient,
)
from gradaccum_conformance.specs import LINEAR

TREES = [random_tree(LINEAR, seed) for seed in range(3)]
WEIGHTS = [3.0, 1.0, 4.0]
by_reduction = pytest.mark.parametrize("reduction", REDUCTIONS)


@by_reduction
def test_gradient_follows_the_definition(
    backend: Harness, mode: str, errors: Errors, reduction: str
) -> None:
    session = start(backend, steps=3, reduction=reduction, mode=mode)
    feed_gradients(session, TREES, WEIGHTS)
    errors.check(
        reduction,
        worst(session.captured().gradient, window_gradient(TREES, WEIGHTS, reduction)),
        bound_of_sum(terms_of_sum(TREES, WEIGHTS, reduction), "float32"),
    )


@by_reduction
@pytest.mark.parametrize("value", [1.0, math.inf, math.nan], ids=str)
def test_weight_zero_adds_exactly_nothing(
    backend: Harness, mode: str, reduction: str, value: float
) -> None:
    """As when every token of a micro-batch is masked and its mean loss is 0/0."""
    alone, together = (
        start(backend, steps=None, reduction=reduction, mode=mode) for _ in range(2)
    )
    for session in (alone, together):
        session.gradients(TREES[0], weight=2.0)
    together.gradients(poisoned(TREES[1], value), weight=0.0)
    assert together.state().micro_step == 2
    for session in (alone, together):
        session.flush()
    assert together.result().applied
    assert same(alone.parameters(), together.parameters())


@pytest.mark.parametrize(
    "options",
    [*({"reduction": each} for each in REDUCTIONS), {"on_overflow": "ignore"}],
    ids=str,
)
def test_zero_total_weight_makes_no_update(
    backend: Harness, mode: str, options: dict[str, Option]
) -> None:
    session = start(backend, steps=2, mode=mode, **options)
    before = session.parameters()
    feed_gradients(session, [TREES[0], poisoned(TREES[1], math.nan)], [0.0, 0.0])
    require_skipped(session, before)
    state = session.state()
    assert state.skipped_windows == 1
    assert state.optimizer_step == 0


@pytest.mark.parametrize("reduction", ["mean", "sum_per_item"])
def test_total_beyond_float32_spoils_one_window(
    backend: Harness, mode: str, reduction: str
) -> None:
    """The next window starts clean, though 0 times infinity is NaN. A sum is divided by
    no weight.
    """
    session = start(backend, steps=2, reduction=reduction, mode=mode)
    before = session.parameters()
    small = random_tree(LINEAR, 0, 1e-3)
    feed_gradients(session, [small, small], [3e38, 3e38])
    require_skipped(session, before, "overflow")
    assert session.state().weight == 0
    feed_gradients(session, [small, small], [1.0, 1.0])
    assert session.result().applied
    assert not same(session.parameters(), before)
