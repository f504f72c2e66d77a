"""The cost law: its command prints the page's table; `test_torch_mirror.py` counts what
windows send.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from typer.testing import CliRunner

pytest.importorskip("rich", reason="the command prints a table")

from benchmarks.cost_law import EACH, NETWORKS, ONCE, WAYS, Window, app, seconds

PAGE = Path(__file__).parents[2] / "backends/gradaccum_torch/DISTRIBUTED.md"


def test_the_page_has_what_the_command_prints() -> None:
    done = CliRunner().invoke(app, env={"COLUMNS": "88"})
    assert done.exit_code == 0, done.output
    printed = "\n".join(line.rstrip() for line in done.stdout.splitlines())
    assert f"```text\n{printed}\n```" in PAGE.read_text(encoding="utf-8")


def test_eight_billion_parameters_save_nine_seconds() -> None:
    """By hand: 2 * 63/64 * 32 GB at 50 GB/s are 1.26 s, in each of eight micro-batches;
    and 301 times 12 latencies of 5 us.
    """
    billions = Window(32 * 10**9, 64, 8, tensors=300, units=32)
    network = NETWORKS["400 Gb/s"]
    once = seconds(WAYS[ONCE].law(billions), network)
    per_micro_batch = seconds(WAYS[EACH].law(billions), network)
    assert math.isclose(once, 1.26 + 301 * 12 * 5e-6, rel_tol=1e-4)
    assert per_micro_batch - once == pytest.approx(8.8, abs=0.05)
