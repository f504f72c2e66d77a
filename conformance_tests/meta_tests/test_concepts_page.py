"""The page on concepts: its programs run, and its tables have what the code has."""

from __future__ import annotations

import ast
import inspect
import re
from dataclasses import fields
from inspect import signature
from pathlib import Path

import pytest

import gradaccum
from conformance_tests.meta_tests.test_readme import PAGES
from gradaccum.kit import State, make_options
from gradaccum.options import ON_OVERFLOW, REDUCTIONS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "gradaccum" / "CONCEPTS.md").read_text(encoding="utf-8")


PROGRAMS = re.findall(r"^```python\n(.*?)^```", PAGE, flags=re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("program", PROGRAMS, ids=["transitions"])
def test_program_runs(program: str) -> None:
    exec(compile(program, "CONCEPTS.md", "exec"), {})


def test_fields_of_the_state() -> None:
    table = PAGE.split("## The state machine")[1].split("How they change")[0]
    assert (
        tuple(re.findall(r"^\| `(\w+)` \|", table, flags=re.MULTILINE)) == State._fields
    )


def options_of(backend: Path) -> set[str]:
    """The options that only one framework has: the keyword-only parameters of its
    backend's ``wrap``.
    """
    functions = [
        node
        for node in ast.walk(ast.parse(backend.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef)
    ]
    return {
        each.arg
        for node in functions
        if node.name == "wrap"
        for each in node.args.kwonlyargs
    }


def test_each_option_stands_once() -> None:
    """One table has every option of every framework; no other page has a row for
    one.
    """
    common = set(signature(make_options).parameters) - {"driver"}
    own = set().union(
        *(options_of(file) for file in ROOT.glob("backends/gradaccum_*/backend.py"))
    )
    table = PAGE.split("## What the options change")[1].split("\n## ")[0]
    rows = [row.split(" | ")[1] for row in table.splitlines() if row.startswith("| ")]
    named = [name for row in rows for name in re.findall(r"`(\w+)=", row)]
    assert set(named) == common | own
    assert {name for name in named if named.count(name) > 1} == {
        "steps",
        "on_overflow",
    }, "each with its several values"
    pages = {page: (ROOT / page).read_text(encoding="utf-8") for page in PAGES}
    rows_of = {
        page: re.findall(r"^\| `(\w+)=[^|]*\|.*\n(?!\|---)", text, flags=re.MULTILINE)
        for page, text in pages.items()
    }
    assert not {
        page: again
        for page, found in rows_of.items()
        if (again := set(found) & set(named))
    }
    assert {*REDUCTIONS, ON_OVERFLOW[1]} <= set(re.findall(r'"(\w+)"', PAGE))


# The page on loss scaling has the code's constants: its table is compared with the
# signatures of the installed packages.


SCALING = (Path(gradaccum.__file__).parent / "LOSS_SCALING.md").read_text(
    encoding="utf-8"
)


def row(name: str) -> list[str]:
    line = next(
        line for line in SCALING.splitlines() if line.startswith("|") and name in line
    )
    return [cell.strip() for cell in line.strip("|").split("|")]


def number(cell: str) -> float:
    base, _, power = cell.partition("^")
    return float(base) ** float(power) if power else float(cell)


def test_page_has_our_defaults() -> None:
    defaults = {
        field.name: field.default for field in fields(gradaccum.DynamicLossScale)
    }
    names = (
        "init_scale",
        "growth_factor",
        "backoff_factor",
        "growth_interval",
        "min_scale",
    )
    assert [number(cell) for cell in row("gradaccum.DynamicLossScale")[1:6]] == [
        defaults[name] for name in names
    ]


def test_page_has_grad_scaler_defaults() -> None:
    amp = pytest.importorskip("torch.amp", reason="torch is not installed")
    parameters = inspect.signature(amp.GradScaler.__init__).parameters
    names = ("init_scale", "growth_factor", "backoff_factor", "growth_interval")
    assert [number(cell) for cell in row("torch.amp.GradScaler")[1:5]] == [
        parameters[name].default for name in names
    ]


def test_our_defaults_equal_grad_scaler() -> None:
    assert row("gradaccum.DynamicLossScale")[1:5] == row("torch.amp.GradScaler")[1:5]
