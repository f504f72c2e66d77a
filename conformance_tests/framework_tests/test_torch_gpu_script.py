"""The checks of a GPU user run on a CPU too, with small sizes; what only a GPU has says
so, and does not pass. The page is the generator's.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks.gpu import stages
from benchmarks.gpu.page import PAGE, RESULTS, page_of
from benchmarks.gpu.problem import distance
from benchmarks.gpu.records import (
    BEGUN,
    ERROR,
    FAIL,
    FIGURE,
    NEEDS_GPU,
    NOT_INSTALLED,
    PASS,
    Check,
    Measured,
    Record,
    Run,
    Setting,
    append,
    read,
    run_check,
)
from benchmarks.gpu.stages import STAGES, TOTAL_SECONDS, Stage, run_all
from benchmarks.gpu.table import counted, plain_table

ROOT = Path(__file__).parents[2]
WITH_TORCH_ALONE = {each.name for each in STAGES} - {"speed", "jax_windows"}
SMALL = Setting("cpu", is_small=True)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.gpu", *arguments]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False
    )


def test_checks_pass_on_a_cpu(tmp_path: Path) -> None:
    results = tmp_path / "results.jsonl"
    done = run("--device", "cpu", "--small", "--results", str(results))
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
    assert [each.name for each in tmp_path.iterdir()] == [results.name]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_missing_cuda_is_reported() -> None:
    done = run()
    assert done.returncode == 2
    assert "no CUDA device" in done.stdout


def test_stages_fit_into_a_run() -> None:
    assert sum(stage.seconds for stage in STAGES) <= TOTAL_SECONDS


def raise_an_error(setting: Setting) -> Measured:
    raise ValueError("no\nluck")


@pytest.mark.parametrize(
    ("check", "status", "measured"),
    [
        (Check("a", lambda _: Measured(True, "1", "2")), PASS, "1"),
        (Check("a", lambda _: Measured(False, "3", "2")), FAIL, "3"),
        (Check("a", lambda _: Measured(None, "3")), FIGURE, "3"),
        (Check("a", raise_an_error), ERROR, "ValueError: no luck"),
        (Check("a", raise_an_error, needs_gpu=True), NEEDS_GPU, ""),
        (
            Check("a", raise_an_error, packages=("os", "no_such.module")),
            NOT_INSTALLED,
            "no_such.module",
        ),
    ],
)
def test_outcome_of_a_check(check: Check, status: str, measured: str) -> None:
    record = run_check("exact", check, SMALL)
    assert (record.status, record.measured) == (status, measured)


def test_process_that_is_ended_leaves_what_it_had(tmp_path: Path) -> None:
    """The stage has not imported torch after a tenth of a second."""
    results = tmp_path / "results.jsonl"
    append(results, {"machine": {"device": "cpu"}})
    append(results, Record("exact", "first", BEGUN)._asdict())
    append(results, Record("exact", "first", PASS, "1e-16")._asdict())
    append(results, Record("exact", "second", BEGUN)._asdict())
    begin = time.monotonic()
    stage = Stage("compiling", "Compiling", 0.1)
    run_all([stage], SMALL, results, TOTAL_SECONDS)
    assert time.monotonic() - begin < 20
    found = read(results)
    assert [each.status for each in found.records] == [PASS, BEGUN, ERROR]
    assert "ended after 0 s" in found.records[-1].measured
    assert len(found.failures()) == 2


def test_stage_without_time_is_not_finished(tmp_path: Path) -> None:
    results = tmp_path / "results.jsonl"
    append(results, {"machine": {"device": "cpu"}})
    run_all(STAGES[:1], SMALL, results, 1)
    (record,) = read(results).records
    assert record.status == BEGUN
    assert "no time was left" in record.measured


def test_file_without_a_run_is_refused(tmp_path: Path) -> None:
    results = tmp_path / "results.jsonl"
    append(results, Record("exact", "first", PASS)._asdict())
    with pytest.raises(ValueError, match="names the machine"):
        read(results)


def test_page_is_the_generator_s() -> None:
    kept = read(RESULTS) if RESULTS.exists() else None
    assert PAGE.read_text(encoding="utf-8") == page_of(kept)
    if kept is None:
        assert "Nothing was run on a GPU yet" in page_of(kept)


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_page_of_a_run(device: str) -> None:
    record = Record("exact", "a | b", FAIL, "1e-3", "1e-12", "0.5", "0.25")
    made = Run({"device": device, "gpu": "a card"}, (record,))
    text = page_of(made)
    assert "| a / b | FAIL | 1e-3 | 1e-12 | 0.5 | 0.25 |" in text
    assert "gpu a card" in text
    assert ("says\nnothing about a GPU" in text) == (device == "cpu")
    assert "Nothing was run" not in text
    assert "a | b  FAIL    1e-3" in plain_table(made)


def test_page_from_no_file_is_refused(tmp_path: Path) -> None:
    before = PAGE.read_bytes()
    done = run("--page", str(tmp_path / "missing.jsonl"))
    assert done.returncode == 2
    assert "there is no" in done.stdout
    assert PAGE.read_bytes() == before


def test_distance_is_relative_to_the_move() -> None:
    start = nn.Linear(2, 2)
    end = nn.Linear(2, 2)
    other = nn.Linear(2, 2)
    with torch.no_grad():
        for p, q, r in zip(*(m.parameters() for m in (start, end, other)), strict=True):
            q.copy_(p + 1.0)
            r.copy_(p + 1.5)
    assert distance(other, end, start) == pytest.approx(0.5)
