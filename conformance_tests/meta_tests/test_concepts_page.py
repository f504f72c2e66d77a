"""The page on concepts: its program runs, and its tables have what the code has."""

from __future__ import annotations

import re
from inspect import signature
from pathlib import Path

import gradaccum
from gradaccum.kit import State, make_options
from gradaccum.options import ON_OVERFLOW, REDUCTIONS

PAGE = (Path(gradaccum.__file__).parent / "CONCEPTS.md").read_text(encoding="utf-8")


def test_program_runs() -> None:
    (program,) = re.findall(r"^```python\n(.*?)^```", PAGE, flags=re.MULTILINE | re.DOTALL)
    exec(compile(program, "CONCEPTS.md", "exec"), {})


def test_fields_of_the_state() -> None:
    table = PAGE.split("## The state machine")[1].split("How they change")[0]
    assert tuple(re.findall(r"^\| `(\w+)` \|", table, flags=re.MULTILINE)) == State._fields


def test_options() -> None:
    names = set(signature(make_options).parameters) - {"driver"}
    assert names <= set(re.findall(r"(\w+)=", PAGE))
    assert {*REDUCTIONS, ON_OVERFLOW[1]} <= set(re.findall(r'"(\w+)"', PAGE))
