"""The mutants that are made by machine: each is Python, and few live."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from conformance_tests.mutation.equivalent import EQUIVALENT, why_equivalent
from conformance_tests.mutation.packages import PACKAGES, Package
from conformance_tests.mutation.running import mutants_of, sample, verdicts
from conformance_tests.programs import ROOT


@pytest.mark.parametrize("package", PACKAGES.values(), ids=PACKAGES)
def test_every_mutant_is_python(package: Package) -> None:
    mutants = mutants_of(package)
    assert len(mutants) > 400
    for mutant in mutants[::29]:
        source = (ROOT / mutant.file).read_text("utf-8")
        ast.parse(mutant.mutation.apply(source))
    for test in package.tests:
        assert (ROOT / "conformance_tests" / test.partition("::")[0]).exists()
    known = {(str(mutant.file), mutant.mutation.becomes) for mutant in mutants}
    named = {
        (file, line)
        for file, lines in EQUIVALENT.items()
        if file.startswith(f"{package.folder}/")
        for line in lines
    }
    assert not named - known, "equivalent to code that is no more"


@pytest.mark.deep
@pytest.mark.parametrize("name", ["core", "torch", "jax", "mindspore"])
def test_small_changes_are_noticed(name: str, tmp_path: Path) -> None:
    pytest.importorskip("coverage")
    pytest.importorskip({"core": "numpy"}.get(name, name))
    package = PACKAGES[name]
    tried = [mutant for mutant in sample(package, 200, 0) if not why_equivalent(mutant)]
    alive = [
        str(mutant)
        for mutant, killer in verdicts(package, tried, tmp_path, most_seconds=300)
        if not killer
    ]
    assert len(alive) <= 0.05 * len(tried), alive
