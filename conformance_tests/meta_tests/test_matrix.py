"""The page of versions: known cells without a failure, and floors as in the metadata."""

from __future__ import annotations

import re
import tomllib

import pytest
from packaging.requirements import Requirement

from conformance_tests.matrix import CELLS, PAGE, ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
EXTRAS = PROJECT["project"]["optional-dependencies"]
ROWS = {
    row.split(" | ")[0].strip("| "): row
    for row in PAGE.read_text("utf-8").splitlines()
    if re.match(r"\| \S+-py\S+ \|", row)
}
CELLS_OF_PAGE = [cell for cell in CELLS if cell.name in ROWS]
MEASURED = [cell for cell in CELLS_OF_PAGE if cell.framework != "resolver"]


def test_the_page_shows_known_cells_without_a_failure() -> None:
    assert ROWS
    assert ROWS.keys() == {cell.name for cell in CELLS_OF_PAGE}
    for row in ROWS.values():
        assert "**no**" not in row
        assert " failed" not in row
    for cell in MEASURED:
        assert re.match(r"\d+ passed", ROWS[cell.name].split(" | ")[6]), cell


@pytest.mark.parametrize("framework", ["torch", "jax", "mindspore"])
def test_the_floor_of_the_metadata_was_measured(framework: str) -> None:
    """And the metadata allows every version that was measured."""
    required = {
        requirement.name: requirement.specifier
        for requirement in map(Requirement, EXTRAS[framework])
        if requirement.name != "numpy"
    }
    measured: dict[str, set[str]] = {name: set() for name in required}
    for cell in MEASURED:
        for package in cell.packages.split():
            name, version = package.split("==")
            if name in required:
                assert required[name].contains(version), (name, version)
                measured[name].add(version)
    for name, specifier in required.items():
        floors = [each.version for each in specifier if each.operator == ">="]
        for floor in floors:
            assert {floor, f"{floor}.0"} & measured[name], (name, floor)
