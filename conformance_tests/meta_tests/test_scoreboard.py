"""The scoreboard's page shows what was measured, and each verdict is the one that the
rows have a cause for. Its table of scores is of the vectors that there are.
"""

from __future__ import annotations

import json

import numpy as np
import pytest

from benchmarks.scoreboard.__main__ import PAGE, RESULTS, as_recorded, table
from benchmarks.scoreboard.measuring import compared
from benchmarks.scoreboard.rows import CAUSES, ROWS
from benchmarks.vectors import __main__ as vectors
from gradaccum_conformance.vectors.run import KINDS, read

MEASURED = json.loads(RESULTS.read_text("utf-8"))


def test_page_shows_what_was_measured() -> None:
    assert table(MEASURED) in PAGE.read_text("utf-8")
    assert MEASURED.keys() == {row.place for row in ROWS}
    assert {row.cause for row in ROWS} - {""} == CAUSES.keys()
    for row in ROWS:
        assert as_recorded(row, MEASURED[row.place]), row.place


def test_another_verdict_is_noticed() -> None:
    """A wrong row that became right, or a control that is not right."""
    row = next(row for row in ROWS if row.cause)
    result = MEASURED[row.place]
    for job, distance in (("unequal", 0.0), ("equal", 1e-3)):
        changed = {**result, job: {**result[job], "distance": distance}}
        assert not as_recorded(row, changed)


def test_distance_of_two_gradients() -> None:
    """A parameter that hardly has a gradient is measured by the whole."""
    large = {"weight": np.array([3.0, 4.0]), "bias": np.array([1e-9])}

    def halved(*, micro, even):
        factor = 0.5 if micro else 1.0
        return {name: factor * gradient for name, gradient in large.items()}

    result = compared(halved, even=True)
    numbers = (result["distance"], result["length"], result["worst_distance"])
    assert numbers == pytest.approx((0.5, 0.5, 0.5))
    assert result["worst"] == "weight"
    with pytest.raises(AssertionError, match="did not move"):
        compared(lambda **_: {"weight": np.zeros(2)}, even=True)


def test_page_shows_the_scores_of_these_vectors() -> None:
    scores = json.loads(vectors.RESULTS.read_text("utf-8"))
    assert scores.keys() == vectors.CONTESTANTS.keys()
    assert vectors.table(scores) in vectors.PAGE.read_text("utf-8")
    number = sum(len(read(kind)) for kind in KINDS)
    for name, score in scores.items():
        total = vectors.total(score)
        assert sum(total.values()) == number
        assert (set(total) == {"passes"}) == name.startswith("gradaccum")
