"""The scoreboard's smallest programs, of the packages that are installed here: each
fails if and only if its row has a cause.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks.scoreboard.__main__ import PROGRAMS, program_passes
from benchmarks.scoreboard.rows import ROWS, Row

RUN_HERE = ("transformers", "trl", "accelerate", "lightning", "optax")
ROWS_WITH_PROGRAMS = [row for row in ROWS if row.program]


@pytest.mark.parametrize(
    "row",
    [row for row in ROWS_WITH_PROGRAMS if row.package in RUN_HERE],
    ids=lambda row: row.program,
)
def test_program_fails_where_the_row_has_a_cause(row: Row) -> None:
    pytest.importorskip(row.package)
    assert program_passes(row.program, Path(sys.executable)) == (not row.cause)


def test_programs_stand_alone() -> None:
    for row in ROWS_WITH_PROGRAMS:
        source = (PROGRAMS / row.program.partition("::")[0]).read_text("utf-8")
        assert "gradaccum" not in source
        assert "benchmarks" not in source
