"""The sections on moving to gradaccum that need another package, with that package."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

pytest.importorskip("torch", reason="needs PyTorch")

from conformance_tests.framework_tests.migrating import Program, programs_of


@pytest.fixture(autouse=True)
def no_state_left() -> Iterator[None]:
    """Accelerate keeps the options of the process's first `Accelerator` for all later ones."""
    yield
    if accelerate := sys.modules.get("accelerate"):
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
        accelerate.state.GradientState._reset_state()


PROGRAMS = [program for program in programs_of("torch") if program.neighbour()]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.title)
def test_program_of_the_page(program: Program) -> None:
    pytest.importorskip(program.neighbour() or "", reason=f"{program.neighbour()} is not installed")
    program.run_here()
