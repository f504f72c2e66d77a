"""Each planted fault must be caught by the suite: a check that cannot fail is a defect."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from .example import install, run_suite
from .mutants import MUTANTS, SELECTED


@pytest.fixture(scope="module")
def light(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Environment of a process that starts fast: no plugins of other packages, and compiled test modules kept from process to process.

    Where Python may not write bytecode, each process would otherwise compile the whole suite again.
    """
    environment = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    if os.environ.get("PYTHONDONTWRITEBYTECODE"):
        environment |= {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(tmp_path_factory.mktemp("bytecode"))}
    return environment


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_is_caught(name: str, tmp_path: Path, light: dict[str, str]) -> None:
    install(tmp_path, harness="mutants.planted:harness")
    done = run_suite(tmp_path, "-x", *SELECTED.get(name, ()), MUTANT=name, **light)
    assert done.returncode == 1, f"the suite did not notice {name}:\n{done.stdout[-2000:]}{done.stderr[-1000:]}"
    assert " failed" in done.stdout
