"""Each framework's own page: its program runs, and its options are those that only its backend has."""

from __future__ import annotations

import re
from inspect import Parameter, signature
from pathlib import Path

import pytest

import gradaccum
from conformance_tests.framework_tests.recipes import Recipe, run_recipe

BACKENDS = Path(__file__).parents[2] / "backends"
FRAMEWORKS = ("torch", "jax", "mindspore")


def page_of(framework: str) -> str:
    return (BACKENDS / f"gradaccum_{framework}" / "README.md").read_text(encoding="utf-8")


def program_of(framework: str) -> str:
    pytest.importorskip(framework, reason=f"{framework} is not installed")
    (program,) = re.findall(r"^```python\n(.*?)^```", page_of(framework), flags=re.MULTILINE | re.DOTALL)
    return program


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_program_of_the_page(framework: str) -> None:
    exec(compile(program_of(framework), f"{framework}'s page", "exec"), {"__name__": "__main__"})


def test_program_from_a_file(tmp_path: Path) -> None:
    """MindSpore's compiler reads the source of what it compiles from a file."""
    run_recipe(Recipe("MindSpore", program_of("mindspore")), tmp_path, GLOG_v="4")


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_options_of_the_page(framework: str) -> None:
    pytest.importorskip(framework, reason=f"{framework} is not installed")
    parameters = signature(gradaccum.load_backend(framework).wrap).parameters
    own = {name for name, parameter in parameters.items() if parameter.kind is Parameter.KEYWORD_ONLY}
    table = page_of(framework).split("## Options that only")[1]
    assert set(re.findall(r"^\| `(\w+)=", table, flags=re.MULTILINE)) == own
