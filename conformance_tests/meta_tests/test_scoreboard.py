"""The scoreboard's page shows what was measured, and each verdict is the one that the
rows have a cause for.
"""

from __future__ import annotations

import ast
import copy
import json

import numpy as np
import pytest

from benchmarks.scoreboard.__main__ import (
    PAGE,
    RESULTS,
    as_recorded,
    short,
    table,
    verdict,
)
from benchmarks.scoreboard.measuring import Gradients, compared
from benchmarks.scoreboard.rows import (
    CAUSES,
    ENVIRONMENTS,
    PYTHONS,
    ROWS,
    SCRIPTS,
    SOURCES,
    Row,
)

MEASURED = json.loads(RESULTS.read_text(encoding="utf-8"))


def test_page_shows_what_was_measured() -> None:
    assert table(MEASURED) in PAGE.read_text(encoding="utf-8")
    assert MEASURED.keys() == {row.place for row in ROWS}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.place)
def test_verdict_is_recorded_and_its_control_agrees(row: Row) -> None:
    found = MEASURED[row.place]
    assert as_recorded(row, found), verdict(found)
    for job in ("unequal", "equal"):
        wrong = copy.deepcopy(found)
        wrong[job]["distance"] = 0.0 if job == "unequal" and row.cause else 1e-3
        assert not as_recorded(row, wrong)


def test_rows_are_functions_with_known_environments_and_causes() -> None:
    for row in ROWS:
        module, name = row.place.split(".")
        tree = ast.parse((RESULTS.parent / f"{module}.py").read_text(encoding="utf-8"))
        assert name in {
            node.name for node in tree.body if isinstance(node, ast.FunctionDef)
        }
        assert row.environment in ENVIRONMENTS
    assert {row.cause for row in ROWS} - {""} == CAUSES.keys()
    assert (
        {row.environment for row in ROWS}
        == ENVIRONMENTS.keys()
        >= PYTHONS.keys() | SCRIPTS.keys()
    )
    for package, (repository, commit) in SOURCES.items():
        taken = [
            text
            for text in (*ENVIRONMENTS[package], SCRIPTS.get(package, ""))
            if f"{repository}/" in text
        ]
        assert taken
        assert all(f"/{commit}" in text for text in taken)


def test_distance_of_two_gradients() -> None:
    """A parameter that hardly has a gradient is measured by the whole."""
    large = {"weight": np.array([3.0, 4.0]), "bias": np.array([1e-9])}

    def row(*, micro: bool, even: bool) -> Gradients:
        return {
            name: each * (0.5 if micro else 1) + (0 if even else 1e-3 * micro)
            for name, each in large.items()
        }

    found = compared(row, even=True)
    assert (
        found["distance"],
        found["length"],
        found["worst"],
        found["worst_distance"],
    ) == pytest.approx((0.5, 0.5, "weight", 0.5))
    assert compared(row, even=False)["worst"] == "weight"
    with pytest.raises(AssertionError, match="did not move"):
        compared(lambda **_: {"weight": np.zeros(2)}, even=True)


def test_verdicts_in_words() -> None:
    found = {
        "distance": 0.25,
        "length": 0.75,
        "worst": "net.weight",
        "worst_distance": 0.5,
    }
    assert verdict({"unequal": found}) == "0.75 times"
    assert verdict({"unequal": {**found, "length": 0.9}}) == "25% off (weight 50%)"
    assert short("decoder.layers_0.pre_self_attention_layer_norm.scale") == (
        "…layer_norm.scale"
    )
    assert (
        verdict({"unequal": {**found, "distance": 1e-8, "length": 1.0}}) == "the same"
    )
