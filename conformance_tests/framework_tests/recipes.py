"""Run each Python block of a page of recipes as its own program. The block asserts its
result.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest

from gradaccum_conformance.workers.pool import free_port

from .preloaded import Preloaded

PAGES = ("RECIPES.md", "DISTRIBUTED.md")
SECONDS = 300
ALONE = "python recipe.py"
PORT = "8118"
"""A port in a page's command; another one, which is free, takes its place."""


class Recipe(NamedTuple):
    """One Python block of a page."""

    title: str
    """The heading of its section."""
    code: str
    command: str = ALONE
    """The section's line of bash: it starts the program, which stands in the file that
    the line names last.
    """
    page: str = PAGES[0]


def recipes_of(package: ModuleType, names: Iterable[str] = PAGES) -> list[Recipe]:
    """Return the Python block of each numbered section of the package's pages. The
    pages may have no other block.
    """
    assert package.__file__ is not None
    pages = {
        name: (Path(package.__file__).parent / name).read_text("utf-8")
        for name in names
    }
    return [
        recipe._replace(page=name)
        for name, page in pages.items()
        for recipe in _recipes_in(page)
    ]


def cases(recipes: Iterable[Recipe]) -> list[Any]:
    """`recipes` for ``parametrize``. Those of several processes, each of which imports
    its framework anew, wait for ``--deep``.
    """
    return [
        pytest.param(
            each,
            id=each.title,
            marks=[pytest.mark.deep] * (each.page == "DISTRIBUTED.md"),
        )
        for each in recipes
    ]


def _recipes_in(page: str) -> list[Recipe]:
    found = []
    for section in re.split(r"^## (?=\d)", page, flags=re.MULTILINE)[1:]:
        blocks = dict(
            re.findall(
                r"^```(bash|python)\n(.*?)^```", section, flags=re.MULTILINE | re.DOTALL
            )
        )
        found += [
            Recipe(
                section.splitlines()[0],
                blocks["python"],
                *[blocks[kind].strip() for kind in ("bash",) if kind in blocks],
            )
        ]
    assert len(found) == page.count("```python"), (
        "a block stands outside of a numbered section, or beside another one"
    )
    return found


def run_preloaded(recipe: Recipe, directory: Path, framework: Preloaded) -> None:
    """As `run_recipe`, where the framework is imported already; one that starts several
    processes imports it anew.
    """
    if recipe.command != ALONE:
        run_recipe(recipe, directory, **framework.environment)
        return
    file = directory / "recipe.py"
    file.write_text(recipe.code, "utf-8")
    status, said = framework.run(file)
    assert status == 0, said[-3000:]


def run_recipe(recipe: Recipe, directory: Path, **environment: str) -> str:
    """Run the block from a file in `directory`; returns what it prints, which the
    assertion shows if it fails. No process outlives it.
    """
    words = shlex.split(
        recipe.command.replace("\\\n", "").replace(PORT, str(free_port()))
    )
    (directory / words[-1]).write_text(recipe.code, "utf-8")
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    running = subprocess.Popen(
        words,
        cwd=directory,
        env={**os.environ, "PATH": path, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        said, _ = running.communicate(timeout=SECONDS)
    finally:
        if running.poll() is None:
            _end(running)
    assert running.returncode == 0, said[-3000:]
    return said


def _end(running: subprocess.Popen[str]) -> None:
    """`msrun` has each worker in a process group of its own, and ends them when it is
    interrupted.
    """
    running.send_signal(signal.SIGINT)
    try:
        running.wait(timeout=30)
    except subprocess.TimeoutExpired:
        pass
    finally:
        if running.poll() is None:
            os.killpg(running.pid, signal.SIGKILL)
