"""mypy --strict and pyright name the mistakes in a user's script, and nothing else in
it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from conformance_tests.programs import ROOT, run_python
from gradaccum import available_backends

SOURCES = [str(ROOT), str(ROOT / "backends")]
MYPY = (
    "--strict --ignore-missing-imports --follow-imports=silent"
    " --explicit-package-bases --config-file= --cache-dir=cache"
)
"""Silent about the packages' own lines: these are checked with the options of
pyproject.toml.
"""
UNTYPED = "  # wrong, but not to mypy"
"""optax has no types of its own, so that mypy takes its objects for anything."""
SCRIPTS = [
    path
    for path in sorted(Path(__file__).parent.glob("typed/*_script.py"))
    if path.name.removesuffix("_script.py") in available_backends()
]
Place = tuple[str, int]
"""A script's name and the number of a line."""


def output_of(folder: Path, *arguments: str) -> str:
    environment = {**os.environ, "MYPYPATH": os.pathsep.join(SOURCES)}
    done = run_python("-m", *arguments, cwd=folder, env=environment, timeout=600)
    return done.stdout


def by_mypy(folder: Path) -> set[Place]:
    said = output_of(folder, "mypy", *MYPY.split(), *(path.name for path in SCRIPTS))
    errors = re.findall(r"^(\w+_script\.py):(\d+): error", said, re.MULTILINE)
    return {(file, int(line)) for file, line in errors}


def by_pyright(folder: Path) -> set[Place]:
    options = {"typeCheckingMode": "standard", "extraPaths": SOURCES}
    (folder / "pyrightconfig.json").write_text(json.dumps(options), "utf-8")
    said = output_of(folder, "pyright", "--outputjson", "--pythonpath", sys.executable)
    return {
        (Path(each["file"]).name, each["range"]["start"]["line"] + 1)
        for each in json.loads(said)["generalDiagnostics"]
        if each["severity"] == "error"
    }


@pytest.mark.deep
@pytest.mark.skipif(not SCRIPTS, reason="no framework is installed")
@pytest.mark.parametrize(
    ("checker", "marks"),
    [(by_mypy, ("  # wrong",)), (by_pyright, ("  # wrong", UNTYPED))],
    ids=["mypy", "pyright"],
)
def test_type_checker_names_the_mistakes(
    checker: Callable[[Path], set[Place]], marks: tuple[str, ...], tmp_path: Path
) -> None:
    wrong = set()
    for script in SCRIPTS:
        shutil.copy(script, tmp_path)
        lines = script.read_text("utf-8").splitlines()
        found = {
            (script.name, number)
            for number, line in enumerate(lines, 1)
            if line.endswith(marks)
        }
        assert found
        wrong |= found
    assert checker(tmp_path) == wrong
