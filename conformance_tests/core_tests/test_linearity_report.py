"""The report on gradients compared at several scales."""

from __future__ import annotations

import math

import numpy as np

from gradaccum import LinearityReport
from gradaccum.kit import SCALES, comparable, linearity_report

EPSILON = 2.0**-23


def report(
    *gradients: dict[str, float], culprits: tuple[str, ...] = ()
) -> LinearityReport:
    return linearity_report(
        ({name: np.float64(g) for name, g in tree.items()} for tree in gradients),
        culprits,
        EPSILON,
        abs,
    )


def test_the_worst_over_the_scales() -> None:
    found = report(
        {"a": 1.0, "b": 1.0},
        {"a": 1.0, "b": 1 + 2.0**-24},
        {"a": 1 - 2.0**-23, "b": 1.0},
    )
    assert found.linear
    assert found.errors == {"a": 2.0**-23, "b": 2.0**-24}
    assert "scale with the loss" in str(found)


def test_above_the_tolerance() -> None:
    found = report(
        {"a": 1.0, "b": 0.0}, {"a": 1.5, "b": 0.0}, culprits=("Clip", "Clip")
    )
    assert not found.linear
    assert found.culprits == ("Clip",)
    assert "a (0.5)" in str(found)
    assert "Clip" in str(found)


def test_nan_is_no_agreement() -> None:
    for trees in (
        [{"a": math.nan}],
        [{"a": 1.0}, {"a": math.nan}],
        [{"a": math.nan}, {"a": 1.0}],
        [{"a": 0.0}, {"a": 1.0}],
    ):
        assert report(*trees).errors == {"a": math.inf}
        assert not report(*trees).linear


def test_a_culprit_alone_is_enough() -> None:
    assert not report({"a": 0.0}, culprits=("Clip",)).linear


def test_float16_compares_the_largest_finite_scales() -> None:
    scales = range(17)
    assert list(comparable(scales, lambda scale: scale < 10, float16=True)) == [
        6,
        7,
        8,
        9,
    ]
    assert list(comparable(scales, lambda scale: False, float16=True)) == [0]
    assert list(comparable(scales, lambda scale: False, float16=False)) == list(scales)


def test_scales() -> None:
    assert SCALES[0] == 1.0
    assert SCALES[-1] == 2.0**16
    assert len(SCALES) == 17


def test_report_shows_itself_in_words() -> None:
    """As the last line of a notebook's cell."""
    assert repr(report({"a": 0.0})) == "The gradients scale with the loss."
