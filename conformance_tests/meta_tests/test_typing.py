"""mypy --strict and pyright name the mistakes in a user's script, and nothing else in
it.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from gradaccum import available_backends

ROOT = Path(__file__).parents[2]
SOURCES = [str(ROOT), str(ROOT / "backends")]
MYPY = [
    "--strict",
    "--ignore-missing-imports",
    "--follow-imports=silent",
    "--explicit-package-bases",
    "--config-file=",
]
"""Silent about the packages' own lines: these are checked with the options of
pyproject.toml.
"""
UNTYPED = "  # wrong, but not to mypy"
"""optax has no types of its own, so that mypy takes its objects for anything."""


Place = tuple[str, int]
"""A script's name and the number of a line."""


def by_mypy(scripts: list[Path], folder: Path) -> set[Place]:
    command = [
        sys.executable,
        "-m",
        "mypy",
        *MYPY,
        f"--cache-dir={folder}",
        *map(str, scripts),
    ]
    environment = {**os.environ, "MYPYPATH": os.pathsep.join(SOURCES)}
    said = subprocess.run(
        command,
        capture_output=True,
        text=True,
        cwd=folder,
        env=environment,
        timeout=600,
    ).stdout
    return {
        (Path(file).name, int(line))
        for file, line in re.findall(
            r"^(.*_script\.py):(\d+): error", said, re.MULTILINE
        )
    }


def by_pyright(scripts: list[Path], folder: Path) -> set[Place]:
    options = {
        "include": [script.name for script in scripts],
        "typeCheckingMode": "standard",
        "extraPaths": SOURCES,
    }
    (folder / "pyrightconfig.json").write_text(json.dumps(options), encoding="utf-8")
    for script in scripts:
        (folder / script.name).write_bytes(script.read_bytes())
    command = [
        sys.executable,
        "-m",
        "pyright",
        "--outputjson",
        "--pythonpath",
        sys.executable,
    ]
    said = json.loads(
        subprocess.run(
            command, capture_output=True, text=True, cwd=folder, timeout=600
        ).stdout
    )["generalDiagnostics"]
    return {
        (Path(each["file"]).name, each["range"]["start"]["line"] + 1)
        for each in said
        if each["severity"] == "error"
    }


@pytest.mark.deep
@pytest.mark.parametrize(
    ("checker", "marks"),
    [(by_mypy, ("  # wrong",)), (by_pyright, ("  # wrong", UNTYPED))],
    ids=["mypy", "pyright"],
)
def test_type_checker_names_the_mistakes(
    checker: Callable[..., set[Place]], marks: tuple[str, ...], tmp_path: Path
) -> None:
    scripts = [
        path
        for path in sorted(Path(__file__).parent.glob("typed/*_script.py"))
        if framework(path) in available_backends()
    ]
    if not scripts:
        pytest.skip("no framework is installed")
    wrong = {
        (script.name, number)
        for script in scripts
        for number, line in enumerate(
            script.read_text(encoding="utf-8").splitlines(), 1
        )
        if line.endswith(marks)
    }
    assert {name for name, _ in wrong} == {script.name for script in scripts}
    assert checker(scripts, tmp_path) == wrong


def framework(script: Path) -> str:
    return script.name.removesuffix("_script.py")
