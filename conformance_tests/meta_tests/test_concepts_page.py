"""The page on concepts: its programs run, and its tables have what the code has."""

from __future__ import annotations

import inspect
import re
from dataclasses import fields
from importlib import import_module

import pytest

from conformance_tests.programs import PYTHON_BLOCK, ROOT
from gradaccum import DynamicLossScale, available_backends
from gradaccum.kit import make_options

PAGE = (ROOT / "gradaccum/CONCEPTS.md").read_text("utf-8")
SCALING = (ROOT / "gradaccum/LOSS_SCALING.md").read_text("utf-8")


def test_programs_run() -> None:
    programs = PYTHON_BLOCK.findall(PAGE)
    assert programs
    for program in programs:
        exec(compile(program, "CONCEPTS.md", "exec"), {})


def test_each_option_has_a_row() -> None:
    """One table has every option of every framework."""
    options = set(inspect.signature(make_options).parameters) - {"driver"}
    frameworks = set(available_backends()) - {"numpy"}
    for name in frameworks:
        backend = import_module(f"gradaccum_{name}.backend").backend
        options |= set(inspect.getfullargspec(backend.wrap).kwonlyargs)
    table = PAGE.split("## What the options change")[1].split("\n## ")[0]
    rows = [row.split(" | ")[1] for row in table.splitlines() if row.startswith("| ")]
    names = {name for row in rows for name in re.findall(r"`(\w+)=", row)}
    assert options <= names
    assert names == options or len(frameworks) < 3


def defaults_on_page(name: str) -> list[float]:
    """The cells of the row of this class, in which 2^16 is a power."""
    (line,) = re.findall(rf"^\|[^|]*{name}.*$", SCALING, re.MULTILINE)
    numbers = re.findall(r"\| *(?:(\d+)\^)?([\d.]+) *(?=\|)", line)
    return [
        float(base) ** float(number) if base else float(number)
        for base, number in numbers
    ]


def test_page_has_the_defaults_of_the_loss_scales() -> None:
    """The first four are those of torch's scaler."""
    page = defaults_on_page("gradaccum.DynamicLossScale")
    names = [field.name for field in fields(DynamicLossScale)][:5]
    assert names[4] == "min_scale"
    scale = DynamicLossScale()
    assert page[:5] == [getattr(scale, name) for name in names]
    amp = pytest.importorskip("torch.amp")
    parameters = inspect.signature(amp.GradScaler.__init__).parameters
    theirs = [parameters[name].default for name in names[:4]]
    assert defaults_on_page("torch.amp.GradScaler")[:4] == theirs == page[:4]
