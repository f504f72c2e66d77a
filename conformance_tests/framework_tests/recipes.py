"""Run each Python block of a page of recipes as its own program. The block asserts its result."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import NamedTuple


class Recipe(NamedTuple):
    """One Python block of the page."""

    title: str
    """The heading of its section."""
    code: str


def recipes_of(package: ModuleType) -> list[Recipe]:
    """Return the first Python block of each numbered section of the package's ``RECIPES.md``. The page may have no other block."""
    assert package.__file__ is not None
    page = (Path(package.__file__).parent / "RECIPES.md").read_text(encoding="utf-8")
    found = re.findall(r"^## (\d[^\n]*)\n(?:(?!^## ).)*?^```python\n(.*?)^```", page, flags=re.MULTILINE | re.DOTALL)
    assert len(found) == page.count("```python") > 0, "a block stands outside of a numbered section"
    return [Recipe(*entry) for entry in found]


def run_recipe(recipe: Recipe, directory: Path, **environment: str) -> None:
    """Run the block from a file in `directory`. If it fails, the assertion shows its error output."""
    script = directory / "recipe.py"
    script.write_text(recipe.code, encoding="utf-8")
    command = [sys.executable, str(script)]
    ran = subprocess.run(command, cwd=directory, env={**os.environ, **environment}, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-3000:]
