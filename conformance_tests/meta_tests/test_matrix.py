"""The page of versions shows what the command of the versions measures, and the
metadata allows what the page shows.
"""

from __future__ import annotations

import re
import tomllib

import pytest
from packaging.requirements import Requirement

from conformance_tests.matrix import CELLS, NEWEST, PAGE, ROOT, Cell, Result, table

EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))[
    "project"
]["optional-dependencies"]
MEASURED = [cell for cell in CELLS if cell.framework != "resolver"]


def rows() -> dict[str, str]:
    found = re.findall(
        r"^\| (\S+-py\S+) \|.*$", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE
    )
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    return {
        name: next(line for line in lines if line.startswith(f"| {name} |"))
        for name in found
    }


def test_every_cell_has_a_name_of_its_own() -> None:
    names = [cell.name for cell in (*CELLS, *NEWEST)]
    assert len(set(names)) == len(names)


def test_the_page_shows_known_cells_without_a_failure() -> None:
    assert rows()
    assert rows().keys() <= {cell.name for cell in CELLS}
    for row in rows().values():
        assert "**no**" not in row
        assert " failed" not in row


@pytest.mark.parametrize("cell", MEASURED, ids=lambda cell: cell.name)
def test_the_metadata_allows_what_was_measured(cell: Cell) -> None:
    asked = {
        one.name: one.specifier for one in map(Requirement, EXTRAS[cell.framework])
    }
    for package in map(Requirement, cell.packages):
        version = next(iter(package.specifier)).version
        assert package.name not in asked or asked[package.name].contains(version), (
            package,
            asked,
        )


@pytest.mark.parametrize("framework", ["torch", "jax", "mindspore"])
def test_the_floor_of_the_metadata_is_a_row(framework: str) -> None:
    measured = {
        package for cell in MEASURED if cell.name in rows() for package in cell.packages
    }
    for one in map(Requirement, EXTRAS[framework]):
        floors = [clause.version for clause in one.specifier if clause.operator == ">="]
        spelt = {f"{one.name}=={floor}{end}" for floor in floors for end in ("", ".0")}
        assert one.name == "numpy" or spelt & measured, one


@pytest.mark.parametrize(
    "cell",
    [cell for cell in MEASURED if cell.name in rows()],
    ids=lambda cell: cell.name,
)
def test_own_tests_were_run(cell: Cell) -> None:
    columns = rows()[cell.name].split(" | ")
    assert re.match(r"\d+ passed", columns[6]), columns


def test_a_failure_is_shown() -> None:
    steps = {"import": (True, "3.0 torch 0"), "suite": (False, "1 failed, 2 passed")}
    assert "1 failed, 2 passed" in table(
        [Result("torch-0-py3", "3.0", "torch 0", "2026-01-01", steps=steps)]
    )
