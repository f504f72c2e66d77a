"""Weights: unequal micro-batches count by their items; a weight of 0 adds nothing; a
total of 0 makes no update.
"""

import math

import numpy as np
import pytest

import gradaccum
from gradaccum_conformance.bounds import bound_of_sum, worst
from gradaccum_conformance.harness import Harness, Option
from gradaccum_conformance.measuring import Errors
from gradaccum_conformance.scenarios import (
    REDUCTIONS,
    poisoned,
    random_tree,
    same,
    start,
)
from gradaccum_conformance.specs import LINEAR, Arrays

WEIGHTS = (3.0, 1.0, 4.0)


def terms(trees: list[Arrays], reduction: str) -> list[Arrays]:
    """The terms of the sum: w g for ``"mean"``, else g."""
    factors = WEIGHTS if reduction == "mean" else (1.0,) * len(trees)
    return [
        {name: factor * array for name, array in tree.items()}
        for factor, tree in zip(factors, trees, strict=True)
    ]


def expected(trees: list[Arrays], reduction: str) -> Arrays:
    """The definition: sum(w g)/sum(w), sum(g), sum(g)/sum(w)."""
    divisor = 1.0 if reduction == "sum" else sum(WEIGHTS)
    return {
        name: np.sum([term[name] for term in terms(trees, reduction)], axis=0) / divisor
        for name in trees[0]
    }


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_gradient_follows_the_definition(
    backend: Harness, mode: str, errors: Errors, reduction: str
) -> None:
    session = start(backend, steps=3, reduction=reduction, mode=mode)
    trees = [random_tree(LINEAR, seed) for seed in range(3)]
    for tree, weight in zip(trees, WEIGHTS, strict=True):
        session.gradients(tree, weight=weight)
    bound = bound_of_sum(terms(trees, reduction), "float32")
    errors.check(
        reduction,
        worst(session.captured().gradient or {}, expected(trees, reduction)),
        bound,
    )


def test_weight_defaults_to_one(backend: Harness) -> None:
    plain, weighted = start(backend, steps=2), start(backend, steps=2)
    for seed in range(2):
        plain.gradients(random_tree(LINEAR, seed))
        weighted.gradients(random_tree(LINEAR, seed), weight=1.0)
    assert same(plain.parameters(), weighted.parameters())


def test_sum_per_item_asks_for_the_weight(backend: Harness, mode: str) -> None:
    """With a weight of 1 by default the learning rate would be too large by the number
    of items.
    """
    session = start(backend, steps=2, reduction="sum_per_item", mode=mode)
    session.gradients(random_tree(LINEAR, 0), weight=3.0)
    before = session.state(), session.accumulator(), session.parameters()
    with pytest.raises(
        gradaccum.ArgumentTypeError, match="weight: expected the number of items"
    ):
        session.gradients(random_tree(LINEAR, 1))
    assert session.state() == before[0]
    assert same(session.accumulator(), before[1])
    session.gradients(random_tree(LINEAR, 1), weight=1.0)
    assert session.result().applied


def test_window_by_weight_asks_for_the_weight(backend: Harness, mode: str) -> None:
    """With a weight of 1 by default windows of 4 items would be windows of 4
    micro-batches. The refused one may be under way, and goes with the window.
    """
    session = start(backend, steps=gradaccum.until_weight(4), mode=mode)
    session.gradients(random_tree(LINEAR, 0), weight=3.0)
    before = session.parameters()
    with pytest.raises(
        gradaccum.ArgumentTypeError, match="weight: expected the number of items"
    ):
        session.gradients(random_tree(LINEAR, 1))
    assert same(session.parameters(), before)
    session.discard()
    session.gradients(random_tree(LINEAR, 1), weight=4.0)
    assert session.result().applied


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_denominator_is_chosen_as_the_window_is_closed(
    backend: Harness, mode: str, errors: Errors, reduction: str
) -> None:
    session = start(
        backend,
        steps=None,
        reduction=reduction,
        loss_scale=4.0,
        clip_norm=1e3,
        mode=mode,
    )
    trees = [random_tree(LINEAR, seed) for seed in range(3)]
    for tree, weight in zip(trees, WEIGHTS, strict=True):
        session.gradients(tree, weight=weight)
    session.flush(denominator=5.0)
    summed = terms(trees, reduction)
    truth = {
        name: np.sum([term[name] for term in summed], axis=0) / 5 for name in trees[0]
    }
    errors.check(
        reduction,
        worst(session.captured().gradient or {}, truth),
        bound_of_sum(summed, "float32"),
    )
    norm = math.sqrt(
        sum(float((array.astype(np.float64) ** 2).sum()) for array in truth.values())
    )
    assert math.isclose(session.result().grad_norm, norm, rel_tol=1e-5)
    session.gradients(trees[0], weight=2.0)
    session.flush()
    assert session.state().optimizer_step == 2, (
        "the next window has its own denominator"
    )


BAD_DENOMINATORS = {
    "zero": (None, 0.0),
    "negative": (None, -1.0),
    "nan": (None, math.nan),
    "text": (None, "5"),
    "beside steps": (2, 5.0),
}


@pytest.mark.parametrize(
    ("steps", "denominator"), BAD_DENOMINATORS.values(), ids=BAD_DENOMINATORS
)
def test_bad_denominator_raises(
    backend: Harness, steps: Option, denominator: Option
) -> None:
    session = start(backend, steps=steps)
    session.gradients(random_tree(LINEAR, 0), weight=3.0)
    with pytest.raises(gradaccum.GradAccumError, match="denominator: expected"):
        session.flush(denominator=denominator)
    assert (session.state().weight, session.state().optimizer_step) == (3.0, 0)
    session.flush()
    assert session.result().applied


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize(
    "value", [1.0, math.inf, math.nan], ids=["finite", "inf", "nan"]
)
def test_weight_zero_adds_exactly_nothing(
    backend: Harness, mode: str, reduction: str, value: float
) -> None:
    """As when every token of a micro-batch is masked and its mean loss is 0/0."""
    alone, together = (
        start(backend, steps=None, reduction=reduction, mode=mode) for _ in range(2)
    )
    for session in (alone, together):
        session.gradients(random_tree(LINEAR, 0), weight=2.0)
    together.gradients(poisoned(random_tree(LINEAR, 1), value), weight=0.0)
    assert together.state().micro_step == 2
    for session in (alone, together):
        session.flush()
    assert together.result().applied
    assert same(alone.parameters(), together.parameters())


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_zero_total_weight_makes_no_update(
    backend: Harness, mode: str, reduction: str
) -> None:
    session = start(backend, steps=2, reduction=reduction, mode=mode)
    before = session.parameters()
    for seed in range(2):
        session.gradients(random_tree(LINEAR, seed), weight=0.0)
    result, state = session.result(), session.state()
    assert (result.applied, result.skipped, result.overflow) == (False, True, False)
    assert (state.skipped_windows, state.optimizer_step, session.captured().calls) == (
        1,
        0,
        0,
    )
    assert same(session.parameters(), before)


def test_state_holds_the_total_weight(backend: Harness) -> None:
    session = start(backend, steps=4)
    for weight in WEIGHTS:
        session.gradients(random_tree(LINEAR, 0), weight=weight)
    assert session.state().weight == sum(WEIGHTS)


@pytest.mark.parametrize("reduction", ["mean", "sum_per_item"])
def test_total_beyond_float32_spoils_one_window(
    backend: Harness, mode: str, reduction: str
) -> None:
    """The next window starts clean, though 0 times infinity is NaN. A sum is divided by
    no weight.
    """
    session = start(backend, steps=2, reduction=reduction, mode=mode)
    before, small = (
        session.parameters(),
        {name: 1e-3 * array for name, array in random_tree(LINEAR, 0).items()},
    )
    for _ in range(2):
        session.gradients(small, weight=3e38)
    result = session.result()
    assert (result.skipped, result.overflow, result.applied) == (True, True, False)
    assert session.state().weight == 0
    assert same(session.parameters(), before)
    for _ in range(2):
        session.gradients(small, weight=1.0)
    assert session.result().applied
    assert not same(session.parameters(), before)
