"""Every Python block of the page on neighbours runs as a program of its own, with the
packages that it imports.
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs PyTorch")

import gradaccum_torch
from conformance_tests.framework_tests.recipes import Recipe, run_recipe

assert gradaccum_torch.__file__ is not None
PAGE = (Path(gradaccum_torch.__file__).parent / "INTEGRATIONS.md").read_text(
    encoding="utf-8"
)


def programs_of(page: str) -> Iterator[Recipe]:
    """Each Python block, by its section and its number there; a block of bash says how
    the next one is started.
    """
    for section in re.split(r"^## ", page, flags=re.MULTILINE)[1:]:
        command, number = Recipe("", "").command, 0
        for kind, code in re.findall(
            r"^```(\w+)\n(.*?)^```", section, flags=re.MULTILINE | re.DOTALL
        ):
            if kind == "bash":
                command = code.strip()
            elif kind == "python":
                number += 1
                yield Recipe(f"{section.splitlines()[0]} {number}", code, command)
                command = Recipe("", "").command


def packages_of(code: str) -> set[str]:
    """The packages that a program imports."""
    nodes = list(ast.walk(ast.parse(code)))
    names = [
        alias.name
        for node in nodes
        if isinstance(node, ast.Import)
        for alias in node.names
    ]
    names += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
    return {name.partition(".")[0] for name in names}


PROGRAMS = list(programs_of(PAGE))
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.title)
def test_program(program: Recipe, tmp_path: Path) -> None:
    missing = sorted(
        name for name in packages_of(program.code) if find_spec(name) is None
    )
    if missing:
        pytest.skip(f"needs {', '.join(missing)}")
    assert re.search(r"^assert |assert_close\(", program.code, flags=re.MULTILINE), (
        "it does not check its result"
    )
    ready = program._replace(
        code=(
            "from conformance_tests.integration_tests import torchvision_ops as"
            f" _\n{program.code}"
        )
    )
    run_recipe(
        ready,
        tmp_path,
        OMP_NUM_THREADS="1",
        PYTHONPATH=os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    )


def test_every_block_is_found() -> None:
    assert len(PROGRAMS) == PAGE.count("```python") > 0


def test_block_of_two_starts_by_its_own_command() -> None:
    page = (
        "## A\n```bash\ntorchrun a.py\n```\n```python\nimport"
        " torch.nn\n```\n```python\nfrom json import load\n```\n"
    )
    first, second = programs_of(page)
    assert (first.title, first.command, second.title, second.command) == (
        "A 1",
        "torchrun a.py",
        "A 2",
        "python recipe.py",
    )
    assert packages_of(first.code + second.code) == {"torch", "json"}
