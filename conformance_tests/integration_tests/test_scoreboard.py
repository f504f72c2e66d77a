"""Rows of the scoreboard in this environment: what its page says of these packages is
still so.
"""

from __future__ import annotations

from importlib import import_module

import pytest

pytest.importorskip("torch", reason="needs PyTorch")

from benchmarks.scoreboard.__main__ import as_recorded, verdict
from benchmarks.scoreboard.measuring import compared
from benchmarks.scoreboard.rows import ROWS

PLACES = (
    "transformers_rows.causal_lm",
    "transformers_rows.classification",
    "accelerate_rows.short_window",
    "lightning_rows.short_batch",
)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("place", PLACES)
def test_row_is_as_recorded(place: str) -> None:
    (row,) = [each for each in ROWS if each.place == place]
    pytest.importorskip(row.package, reason=f"needs {row.package}")
    module, function = place.split(".")
    run = getattr(import_module(f"benchmarks.scoreboard.{module}"), function)
    found = {"unequal": compared(run, even=False), "equal": compared(run, even=True)}
    assert as_recorded(row, found), verdict(found)
