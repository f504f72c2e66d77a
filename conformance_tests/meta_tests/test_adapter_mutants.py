"""Each fault that is planted in an adapter is caught by its test; with ``--deep``, as
all of them take minutes.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from conformance_tests.framework_tests.preloaded import Preloaded
from gradaccum import available_backends

from .adapter_mutants import ADAPTERS, Mutant
from .adapter_mutants.planting import places, planted, program_of

PAIRS = [
    pytest.param(adapter, mutant, id=f"{adapter}-{mutant.name}")
    for adapter, mutants in ADAPTERS.items()
    for mutant in mutants
]
by_mutant = pytest.mark.parametrize(("adapter", "mutant"), PAIRS)


@by_mutant
def test_mutant_can_be_planted(adapter: str, mutant: Mutant) -> None:
    assert len(places(adapter, mutant)) == 1, (
        f"{mutant.old!r} must stand once in the adapter: in meta_tests/adapter_mutants,"
        f" write the text of {mutant.name} as the code is now"
    )
    ast.parse(planted(adapter, mutant)[1])


@pytest.fixture(scope="module")
def imported() -> Iterator[dict[str, Preloaded]]:
    """By adapter, a process that has imported its framework."""
    servers: dict[str, Preloaded] = {}
    yield servers
    for server in servers.values():
        server.__exit__()


@pytest.mark.deep
@by_mutant
def test_mutant_is_caught(
    adapter: str, mutant: Mutant, tmp_path: Path, imported: dict[str, Preloaded]
) -> None:
    if adapter not in available_backends():
        pytest.skip(f"{adapter} is not installed")
    if adapter not in imported:
        imported[adapter] = Preloaded("pytest", adapter, "gradaccum_conformance")
    program = tmp_path / "planted.py"
    program.write_text(program_of(adapter, mutant, tmp_path), "utf-8")
    status, said = imported[adapter].run(program)
    assert status == 1, f"{mutant.test} did not notice {mutant.name}:\n{said[-3000:]}"
    assert " failed" in said
