"""The cost law: its command prints the page's table; `test_torch_mirror.py` counts what
windows send.
"""

from __future__ import annotations

import math

import pytest
from typer.testing import CliRunner

pytest.importorskip("rich", reason="the command prints a table")

from benchmarks.cost_law import BUCKET, EACH, NETWORKS, ONCE, WAYS, Window, app, seconds
from conformance_tests.programs import ROOT

BILLIONS = Window(32 * 10**9, 64, 8, tensors=300, units=32)
SMALL = Window(12 * 1024, 1024, 4, tensors=6, units=2)
PAGE = ROOT / "backends/gradaccum_torch/DISTRIBUTED.md"


def test_the_page_has_what_the_command_prints() -> None:
    done = CliRunner().invoke(app, env={"COLUMNS": "88"})
    assert done.exit_code == 0, done.output
    printed = "\n".join(line.rstrip() for line in done.stdout.splitlines())
    assert f"```text\n{printed}\n```" in PAGE.read_text("utf-8")


@pytest.mark.parametrize("window", [BILLIONS, SMALL])
@pytest.mark.parametrize("name", [name for name in WAYS if name != EACH])
def test_formulas_of_the_page_are_the_law_s(name: str, window: Window) -> None:
    way = WAYS[name]
    window = window._replace(copies=2 if name.startswith("HSDP") else 1)
    large = window.gradients > BUCKET
    letters = {
        "S": window.gradients,
        "N": window.steps,
        "W": window.workers,
        "n": window.tensors,
        "U": window.units,
        "R": window.copies,
        "L": window.tensors * large,
        "B": int(not large),
    }
    sent = way.law(window).values()
    assert sum(each.collectives for each in sent) == eval(way.collectives, letters)
    assert sum(each.bytes for each in sent) == eval(way.bytes, letters)


def test_eight_billion_parameters_save_nine_seconds() -> None:
    """By hand: 2 * 63/64 * 32 GB at 50 GB/s are 1.26 s, in each of eight micro-batches;
    and 301 times 12 latencies of 5 us.
    """
    network = NETWORKS["400 Gb/s"]
    once = seconds(WAYS[ONCE].law(BILLIONS), network)
    per_micro_batch = seconds(WAYS[EACH].law(BILLIONS), network)
    assert math.isclose(once, 1.26 + 301 * 12 * 5e-6, rel_tol=1e-4)
    assert per_micro_batch - once == pytest.approx(8.8, abs=0.05)
