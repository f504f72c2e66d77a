"""The loop check: what coefficients mean, on plain numbers."""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np
import pytest

import gradaccum
from gradaccum import loop_check
from gradaccum.least_squares import GradientBasis, WeightedSum
from gradaccum.loop_check import (
    LoopReport,
    items_of,
    recorded_batches,
    rounding_of,
)

WEIGHTS = (5.0, 3.0, 4.0, 2.0)
RIGHT = tuple(weight / 14 for weight in WEIGHTS)


def read(*rows, weights=WEIGHTS, norms=(), **options):
    updates = [WeightedSum(tuple(row), 1e-9, 1e-15, 1.0, norms) for row in rows]
    return LoopReport(updates, weights, **options)


def kinds(report):
    return [problem.kind for problem in report.problems]


@pytest.mark.parametrize(
    ("rows", "options", "found"),
    [
        ([RIGHT], {}, []),
        ([(5 / 8, 3 / 8, 0, 0), (0, 0, 4 / 6, 2 / 6)], {"steps": 2}, []),
        ([(5 / 12, 3 / 12, 4 / 12, 0), (0, 0, 0, 1)], {"steps": 3}, []),
        ([(1, 1, 1, 1)], {"reduction": "sum"}, []),
        ([(1 / 14,) * 4], {"reduction": "sum_per_item"}, []),
        ([(0.25,) * 4], {}, ["mean_of_means"]),
        ([(1, 1, 1, 1)], {}, ["not_divided"]),
        ([(0, 0, 0, 0.25)], {}, ["only_last"]),
        ([(5 / 12, 3 / 12, 4 / 12, 0), (0, 0, 0, 1 / 3)], {}, ["short_window"]),
        ([(5 / 12, 3 / 12, 4 / 12, 0)], {}, ["lost"]),
        ([(0.0625, 0.125, 0.25, 0.5)], {}, ["scaled_inside"]),
        ([(0.0729, 0.081, 0.09, 0.1)], {}, ["scaled_inside"]),
        ([(0.01, 0.03, 0.1, 0.25)], {}, ["scaled_inside"]),
        ([(1, 0.75, 0.5, 0.25)], {}, ["counted_again"]),
        ([(0.1, 0.3, 0.2, 0.4)], {}, ["weights"]),
        ([tuple(4 * part for part in RIGHT)], {}, ["scaled"]),
        ([tuple(part / 10 for part in RIGHT)], {}, ["scaled"]),
        ([(1, 0, 0, 0), (0, 3 / 7, 4 / 7, 0)], {"steps": 2}, ["lost", "boundary"]),
        ([(5 / 8, 3 / 8, 0, 0), (5 / 8, 3 / 8, 4 / 6, 2 / 6)], {}, ["leaked"]),
        ([], {}, ["no_update"]),
        ([RIGHT, (0, 0, 0, 0)], {}, ["empty"]),
        (
            [(0, 0), (1, 0), (0, 1)],
            {"weights": (1, 1), "steps": 1},
            ["empty"],
        ),
        ([RIGHT], {"clip_norm": 0.9}, ["not_clipped"]),
        (
            [(0, 0, 0.5, 0.5, 0, 0), (0, 0, 0, 0, 0.5, 0.5)],
            {"weights": (0, 0, 1, 1, 1, 1), "steps": 2},
            [],
        ),
        ([(1 - 3e-4, 3e-4)], {"weights": (1, 3e-4)}, []),
        ([(1, 0)], {"weights": (1, 3e-4)}, ["lost"]),
        ([(1, 0)], {"weights": (1, 3e-4), "rounding": 1e-3}, []),
        ([(0.9, 0.1008)], {"weights": (9, 1), "rounding": 1e-3}, []),
    ],
)
def test_kind(rows, options, found):
    report = read(*rows, **options)
    assert kinds(report) == found, report
    assert report.right == (not found)
    assert ("is right" in str(report)) == (not found)


@pytest.mark.parametrize("norms", [(4.0, 2.0, 0.5, 1.0), (4.0, 2.0)])
def test_each_micro_batch_clipped_alone(norms) -> None:
    """Those above the limit have one norm; the third is below it."""
    rows = [tuple(min(1, 0.8 / norm) / 4 for norm in norms)]
    report = read(*rows, norms=norms, weights=WEIGHTS[: len(norms)])
    assert kinds(report) == ["clipped_each"]


def test_micro_batch_of_weight_zero_is_not_missed() -> None:
    report = read((0.5, 0, 0.5), weights=(2.0, 0.0, 2.0))
    assert report.right, report


def test_two_workers() -> None:
    """A row of micro-batches per worker; the rows are those of worker 0 and worker 1."""
    weights = (1.0,) * 4
    assert read((0.25,) * 4, weights=weights, workers=2).right
    alone = read((0.5, 0.5, 0, 0), weights=weights, workers=2)
    assert "not_reduced" in kinds(alone)
    last = read((0.25, 0.25, 0, 0.25), weights=weights, workers=2)
    assert "not_reduced" in kinds(last)
    assert "2 of worker 0, 1 of worker 1" in str(last)
    assert "Micro-batch 1 of worker 1 never" in str(last)
    assert read((0.5, 0, 0.25, 0.25), weights=(2.0, 0.0, 1.0, 1.0), workers=2).right
    assert kinds(read((0.125,) * 4, weights=weights, workers=2)) == ["scaled"]


def test_clip_of_the_whole_is_a_note() -> None:
    rows = [(0.05, 0.03, 0, 0), (0, 0, 0.06, 0.03)]
    report = read(*rows, steps=2, clip_norm=1.0)
    assert report.right
    assert "Note: Update 2 was clipped as a whole." in str(report)
    # torch divides by the norm + 1e-6, which shows if the limit is small.
    small = WeightedSum(rows[0], 1e-9, 1e-15, 9.91e-5)
    assert LoopReport([small], (5.0, 3.0, 0.0, 0.0), clip_norm=1e-4).right


def test_report_in_words() -> None:
    """The loss was divided once too often, in more updates than are shown."""
    words = str(read(*[tuple(part / 4 for part in RIGHT)] * 9))
    assert "the loss was divided by 4 once too often" in words
    assert "Update 1, factors" in words
    assert words.endswith("and 1 more updates.")


def test_one_clipped_update_needs_the_norm() -> None:
    row = tuple(part / 10 for part in RIGHT)
    assert "If the loop clips each window, pass clip_norm=" in str(read(row))
    assert read(row, clip_norm=1.0).right
    assert kinds(read(row, clip_norm=2.0)) == ["scaled"]


def test_micro_batch_of_weight_zero_that_counts() -> None:
    report = read((0.5, 0.2, 0.5), weights=(2.0, 0.0, 2.0))
    assert kinds(report) == ["weights"]
    assert "micro-batch 2, whose weight is 0" in str(report)


def test_gradient_of_zero_is_not_called_lost() -> None:
    row = (0.5, 0.0, 0.5)
    report = read(row, weights=(1.0, 1.0, 1.0), norms=(1.0, 0.0, 1.0))
    assert "micro-batch 2 is zero" in report.uncertain
    report = read(row, weights=(1.0, 1.0, 1.0), norms=(1.0, math.nan, 1.0))
    assert "micro-batch 2 is not finite" in report.uncertain
    overflowed = WeightedSum((math.nan,), math.inf, 0.0, math.inf)
    assert "smaller scale" in LoopReport([overflowed], (1.0,)).uncertain
    assert read(row, weights=(1.0, 0.0, 1.0), norms=(1.0, 0.0, 1.0)).right


def test_update_after_the_last_window_is_off_by_a_boundary() -> None:
    report = read((1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), steps=2)
    assert kinds(report) == ["lost", "boundary"]
    assert "it should contain micro-batches 1 to 2" in str(report)
    late = read((1, 0, 0, 0), (0, 0, 1, 0), (0, 1, 0, 0), steps=2, weights=(1.0,) * 4)
    assert kinds(late) == ["lost", "boundary"]


def test_what_no_coefficients_explain() -> None:
    """The other update is not measured by the error of this one."""
    update = WeightedSum(RIGHT, 2.0, 0.2, 1.0)
    report = LoopReport(
        [update, update._replace(unexplained=0.0, uncertainty=0.0)], WEIGHTS
    )
    assert kinds(report) == ["unexplained"]
    assert not report.notes
    assert "20% of update 1" in str(report)


@pytest.mark.parametrize("uncertainty", [math.inf, 0.3])
def test_it_says_that_it_cannot_tell(uncertainty: float) -> None:
    update = WeightedSum((math.nan,) * 4, uncertainty, 0.0, 1.0)
    report = LoopReport([update], WEIGHTS)
    assert not report.right
    assert str(report).startswith("Cannot tell")


def test_coarse_rounding_of_similar_gradients_is_not_called_right() -> None:
    gradients = np.array([[1.0, 0.0, 0.0], [1.0, 0.1, 0.0]])
    update = GradientBasis(gradients).weighted_sum(gradients.sum(axis=0) / 2)
    assert update.condition == pytest.approx(10, rel=0.1)
    weights = (1.0, 1.0)
    assert LoopReport([update], weights, rounding=0.005).right
    light = LoopReport([update], (1.0, 0.01), rounding=0.005)
    assert "Note: The weight of micro-batch 2 is too small to check" in str(light)
    assert "too similar" in LoopReport([update], weights, rounding=0.02).uncertain


def test_reduction_is_checked() -> None:
    with pytest.raises(gradaccum.ArgumentValueError, match="reduction"):
        read(RIGHT, reduction="median")


@pytest.mark.parametrize("count", [1, 4, 32])
def test_coefficients_are_found(count: int) -> None:
    """Sizes of 1e-6 to 1e6; gradients with one large common direction."""
    generator = np.random.default_rng(count)
    gradients = generator.normal(size=(count, 200)) + 3 * generator.normal(size=200)
    gradients *= 10.0 ** np.linspace(-6, 6, count)[:, None]
    right = generator.uniform(0.5, 2, count) / np.linalg.norm(gradients, axis=1)
    update = GradientBasis(gradients).weighted_sum(right @ gradients)
    np.testing.assert_allclose(update.coefficients, right, rtol=1e-10)
    assert update.unexplained < 1e-14
    assert update.norm == pytest.approx(np.linalg.norm(right @ gradients))


def test_rounding_shows_in_the_uncertainty() -> None:
    generator = np.random.default_rng(0)
    gradients = generator.normal(size=(4, 500))
    noise = 1e-3 * generator.normal(size=500)
    update = GradientBasis(gradients).weighted_sum(np.ones(4) @ gradients + noise)
    off = np.abs(np.asarray(update.coefficients) - 1).max()
    assert off < update.uncertainty < 1e-3
    assert 1e-4 < update.unexplained < 1e-3


@pytest.mark.parametrize(
    "gradients",
    [np.ones((2, 9)), np.zeros((2, 9)), np.full((1, 9), np.nan), np.eye(3)],
    ids=["alike", "zero", "not finite", "as many as elements"],
)
def test_gradients_that_tell_nothing(gradients) -> None:
    update = GradientBasis(gradients).weighted_sum(np.ones(gradients.shape[1]))
    assert math.isinf(update.uncertainty)


@pytest.mark.parametrize(
    ("micro_batch", "items"),
    [
        (({"x": np.zeros((3, 2)), "y": np.zeros(3)}, 1.0), 3),
        ((np.zeros((4, 3)), np.zeros(2)), 4),
        (([np.zeros((3, 5))] * 2, [0, 1]), 2),
    ],
)
def test_items_are_counted(micro_batch, items) -> None:
    assert items_of(*micro_batch) == items


def test_micro_batches_are_the_same_in_each_iteration() -> None:
    class Shuffled(dict):
        def __iter__(self):
            self["order"].reverse()
            return iter(self["order"])

    x = np.arange(3.0)
    assert recorded_batches([x]) == [(x,)]
    gap = np.array([math.nan])
    for steady in (iter([gap]), {0: gap}.values(), {"name": 1}):
        assert len(recorded_batches(steady)) == 1
    for unsteady in ([], Shuffled(order=[x, -x])):
        with pytest.raises(gradaccum.ArgumentValueError, match="train on this list"):
            recorded_batches(unsteady)


@pytest.mark.parametrize("first", [{"x": np.zeros(3), "y": np.zeros(2)}, 1.0])
def test_items_that_are_not_clear_need_a_weight(first) -> None:
    with pytest.raises(gradaccum.ArgumentValueError, match="weight: expected a func"):
        items_of(first, np.zeros(3))


def test_rounding_is_measured_unless_the_loss_is_random() -> None:
    """By every worker with as many runs, even if a gradient is zero."""
    gradients = [np.ones(3), np.arange(3.0), np.zeros(3)]
    runs = []

    def gradient_of(number, factor):
        runs.append(number)
        return factor * gradients[number] + (factor == 3) * 0.03 * gradients[number]

    measured = rounding_of(gradients, gradient_of)
    assert measured == pytest.approx(0.01)
    assert not rounding_of(
        gradients, lambda number, factor: gradient_of(number, factor + factor**2)
    )
    assert runs == [0] * 4 + [1] * 4 + [2] * 4 + [0] * 4 + [1] * 4 + [2] * 4

    def underflowing(number, factor):
        return factor * (gradients[number] + (factor > 3) * 0.02)

    # The loop check must not take a hook that clips for float16.
    for is_float16 in (True, False):
        measured_here = rounding_of(gradients, underflowing, is_float16=is_float16)
        assert measured_here == pytest.approx(0.02 * is_float16)
    assert not rounding_of(
        gradients,
        lambda number, factor: factor * gradients[number] * (1 + 1e-5 * factor),
        is_float16=True,
    )
    updates = [0.5 * sum(gradients) + 0.01 * np.array([1, -2, 1])]
    for rounding, is_explained in ((0.0, False), (measured, True), (0.1, False)):
        report = loop_check.loop_report(
            gradients, updates, [1, 1, 0], 1e-7, measure_rounding=[rounding].pop
        )
        assert ("unexplained" not in kinds(report)) is is_explained


def test_page_has_every_kind() -> None:
    source = Path(loop_check.__file__).read_text(encoding="utf-8")
    documented = source[source.index("    kind: str") : source.index("    update: int")]
    kinds_of_the_code = set(re.findall(r"``\"(\w+)\"``", documented))
    page = Path(gradaccum.__file__).with_name("VERIFY.md").read_text(encoding="utf-8")
    section = page[
        page.index("## Is my loop right?") : page.index("## How to read the report")
    ]
    rows = re.findall(r"^\| (`\w+`.*?) \|", section, re.MULTILINE)
    assert set(re.findall(r"`(\w+)`", " ".join(rows))) - {"kind"} == kinds_of_the_code
