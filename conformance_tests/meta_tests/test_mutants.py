"""Each planted fault must be caught by the suite: a check that cannot fail is a
defect.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from conformance_tests.framework_tests.preloaded import Preloaded
from gradaccum_conformance.deep import deep_but
from gradaccum_conformance.reference import harness

from .example import EXAMPLE, install, program_of
from .mutants import MUTANTS
from .mutants.planting import changed

EACH = 8
"""How many of the mutants wait for ``--deep`` beside the one that does not: each runs
the suite until it fails.
"""


def test_mutants_can_be_planted() -> None:
    files = [*EXAMPLE.glob("*.py"), Path(str(harness.__file__))]
    sources = {file.name: file.read_text(encoding="utf-8") for file in files}
    for mutant in MUTANTS.values():
        texts = changed(mutant, sources)
        assert texts
        for text in texts.values():
            ast.parse(text)


@pytest.mark.parametrize("name", deep_but(list(MUTANTS)[::EACH], MUTANTS))
def test_mutant_is_caught(name: str, tmp_path: Path, light: Preloaded) -> None:
    install(tmp_path, harness="mutants.planted:harness")
    program = tmp_path / "planted.py"
    only = ("-k", MUTANTS[name].test) if MUTANTS[name].test else ()
    program.write_text(program_of(tmp_path, "-x", *only, MUTANT=name), encoding="utf-8")
    status, said = light.run(program)
    assert status == 1, f"the suite did not notice {name}:\n{said[-3000:]}"
    assert " failed" in said
