"""Each planted fault that changes a number of one worker's windows is seen in the
vectors. The others are listed with the reason.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from conformance_tests.framework_tests.preloaded import Preloaded
from gradaccum_conformance.deep import deep_but

from .example import install, program_of
from .mutants import MUTANTS

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
EACH = 8
"""How many of the mutants wait for ``--deep`` beside the one that does not."""


@pytest.mark.parametrize("name", deep_but(list(MUTANTS)[::EACH], MUTANTS))
def test_vectors_show_the_fault(name: str, tmp_path: Path, light: Preloaded) -> None:
    install(tmp_path, harness="mutants.planted:harness")
    program = tmp_path / "planted.py"
    program.write_text(
        program_of(tmp_path, "-x", "-k", "test_vectors", MUTANT=name), encoding="utf-8"
    )
    status, said = light.run(program)
    seen = status == 1 and " failed" in said
    passed = status == 0 and "3 passed" in said
    assert seen or passed, said[-3000:]
    assert seen != (name in UNSEEN), UNSEEN.get(name, "no vector shows it")
