"""Each planted fault must be caught by the suite: a check that cannot fail is a defect."""

from __future__ import annotations

import pytest

from .example import install, run_suite
from .mutants import MUTANTS


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_is_caught(name: str, tmp_path) -> None:
    install(tmp_path)
    done = run_suite(tmp_path, "-x", "-p", "mutants", MUTANT=name)
    assert done.returncode == 1, f"the suite did not notice {name}:\n{done.stdout[-2000:]}{done.stderr[-1000:]}"
    assert " failed" in done.stdout
