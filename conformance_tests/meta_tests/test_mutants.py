"""Each planted fault must be caught by the suite: a check that cannot fail is a
defect. The vectors alone show each fault that changes a number of one worker's windows;
the others are listed with the reason.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from conformance_tests.framework_tests.preloaded import Preloaded
from gradaccum_conformance.deep import deep_but
from gradaccum_conformance.reference import harness

from .example import EXAMPLE, install, run_suite
from .mutants import MUTANTS
from .mutants.planting import changed

by_name = pytest.mark.parametrize("name", deep_but(list(MUTANTS)[::8], MUTANTS))
"""Seven of eight mutants wait for ``--deep``: each runs the suite until it fails."""
REASONS = {
    "test_workers": "no vector has several workers",
    "test_one_call": "no vector splits a large batch in one call",
}
UNSEEN = {
    name: reason
    for name, mutant in MUTANTS.items()
    for part, reason in REASONS.items()
    if part in mutant.test
}
UNSEEN["take_any_size"] = "no vector has a function as its window's size"
UNSEEN["load_without_checks"] = "all vectors have parameters of the same shapes"


def test_mutants_can_be_planted() -> None:
    files = [*EXAMPLE.glob("*.py"), Path(str(harness.__file__))]
    sources = {file.name: file.read_text("utf-8") for file in files}
    for mutant in MUTANTS.values():
        texts = changed(mutant, sources)
        assert texts
        for text in texts.values():
            ast.parse(text)


@by_name
def test_mutant_is_caught(name: str, tmp_path: Path, light: Preloaded) -> None:
    install(tmp_path, harness="mutants.planted:harness")
    only = ("-k", MUTANTS[name].test) if MUTANTS[name].test else ()
    status, said = run_suite(light, tmp_path, "-x", *only, MUTANT=name)
    assert status == 1, f"the suite did not notice {name}:\n{said[-3000:]}"
    assert " failed" in said


@by_name
def test_vectors_show_the_fault(name: str, tmp_path: Path, light: Preloaded) -> None:
    install(tmp_path, harness="mutants.planted:harness")
    status, said = run_suite(light, tmp_path, "-x", "-k", "test_vectors", MUTANT=name)
    seen = status == 1 and " failed" in said
    passed = status == 0 and "3 passed" in said
    assert seen or passed, said[-3000:]
    assert seen != (name in UNSEEN), UNSEEN.get(
        name, "no vector shows it: add one, or say in UNSEEN why there is none"
    )
