"""The checks of a GPU user run on a CPU too, with small sizes; what only a GPU has says
so, and does not pass. The page is the generator's.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.gpu import stages
from benchmarks.gpu.page import PAGE, RESULTS, page_of
from benchmarks.gpu.records import FIGURE, NEEDS_GPU, PASS, read
from benchmarks.gpu.stages import STAGES
from benchmarks.gpu.table import counted
from conformance_tests.programs import ROOT, run_python

WITH_TORCH_ALONE = {each.name for each in STAGES} - {"speed", "jax_windows"}


@pytest.mark.slow
def test_checks_pass_on_a_cpu(tmp_path: Path) -> None:
    results = tmp_path / "results.jsonl"
    options = ("--device", "cpu", "--small", "--results", str(results))
    done = run_python("-m", "benchmarks.gpu", *options, cwd=ROOT)
    found = read(results)
    assert done.returncode == 0, "\n".join(map(str, found.failures())) + done.stderr
    assert {record.stage for record in found.records} == {each.name for each in STAGES}
    by_check = {(each.stage, each.check): each for each in found.records}
    for stage in WITH_TORCH_ALONE:
        for check in stages.checks_of(stage):
            record = by_check[stage, check.name]
            if check.needs_gpu:
                assert record.status == NEEDS_GPU
            else:
                assert record.status in (PASS, FIGURE)
    assert counted(found) in done.stdout


def test_page_is_the_generator_s() -> None:
    kept = read(RESULTS) if RESULTS.exists() else None
    assert PAGE.read_text("utf-8") == page_of(kept)
