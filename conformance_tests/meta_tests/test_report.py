"""The conformance report: nothing that went wrong may look right in it."""

from __future__ import annotations

import io
import json
import math
import sys
from pathlib import Path

import pytest
from rich.console import Console

from gradaccum_conformance.output import write_json
from gradaccum_conformance.report import Measurement, Run, results_of
from gradaccum_conformance.report.page import render_page
from gradaccum_conformance.report.table import make_table
from gradaccum_conformance.runner import Ended, Job, Record, run_jobs


def record(
    outcome: str = "passed", *errors: tuple[str, float, float], reason: str = ""
) -> Record:
    keys = ("label", "measured", "bound")
    return {
        "kind": "test",
        "backend": "torch",
        "property": "weights",
        "test": f"test that {outcome}",
        "outcome": outcome,
        "reason": reason,
        "errors": [dict(zip(keys, error, strict=True)) for error in errors],
        "seconds": 0.5,
    }


def ended(*tests: Record, exit_code: int = 0) -> Ended:
    first = {"kind": "collected", "backend": "torch", "tests": len(tests)}
    last = {"kind": "finished", "exit_status": exit_code}
    return Ended("torch", exit_code, (first, *tests, last), "")


def run_of(process: Ended) -> Run:
    """A run of one backend, for which JAX was not installed."""
    results = results_of(process)
    date = "2001-02-03T04:05:06+00:00"
    return Run((results,), ("jax",), False, results.passed, date)


def printed_table(run: Run) -> str:
    console = Console(file=io.StringIO(), width=120)
    console.print(make_table(run))
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


COLLECTED_THREE = {"kind": "collected", "backend": "torch", "tests": 3}
COLLECTED_ONE = {"kind": "collected", "backend": "torch", "tests": 1}
FINISHED = {"kind": "finished", "exit_status": 0}
UNREADABLE = {"kind": "unreadable", "line": "?"}


@pytest.mark.parametrize(
    ("exit_code", "records", "problem"),
    [
        (-11, (COLLECTED_ONE, record(), FINISHED), "exit code -11"),
        (0, (COLLECTED_ONE, record()), "before it was done"),
        (0, (), "no test"),
        (0, (COLLECTED_ONE, record("skipped"), FINISHED), "no test"),
        (0, (COLLECTED_THREE, record(), FINISHED), "3 tests were collected, 1 left"),
        (0, (COLLECTED_ONE, record(), UNREADABLE, FINISHED), "1 unreadable"),
    ],
)
def test_incomplete_run_fails(
    exit_code: int, records: tuple[Record, ...], problem: str
) -> None:
    results = results_of(Ended("torch", exit_code, records, ""))
    assert not results.passed
    assert any(problem in words for words in results.problems)


@pytest.mark.parametrize("outcome", ["failed", "xpassed", "error"])
def test_unknown_outcome_fails(outcome: str) -> None:
    results = results_of(ended(record(), record(outcome), exit_code=1))
    assert not results.passed
    assert [test.name for test in results.failures] == [f"test that {outcome}"]
    assert results.problems == (), "the exit code is explained by the failure"


@pytest.mark.parametrize(
    ("outcomes", "status", "counts"),
    [
        (["passed", "failed", "xpassed"], "failed", "2 failed, 1 passed"),
        (["passed", "xfailed"], "gap", "1 passed, 1 declared gap"),
        (["passed", "skipped"], "passed", "1 passed, 1 skipped"),
        (["skipped"], "skipped", "1 skipped"),
    ],
)
def test_cell_counts_outcomes(outcomes: list[str], status: str, counts: str) -> None:
    cell = results_of(ended(*map(record, outcomes))).cell("weights")
    assert cell.status == status
    assert cell.counts == counts


def test_worst_error_is_nearest_its_bound() -> None:
    """A declared gap has none; a bound of 0 and NaN are far beyond."""
    far = ("far", 1e-3, 1.0)
    near = ("near", 4e-9, 1e-8)
    gap = record("xfailed", ("gap", 9.0, 1.0))
    worst = results_of(ended(record("passed", far, near), gap)).cell("weights").worst
    assert worst == Measurement(*near)
    assert str(worst) == "4.0e-09 (0.4)"
    assert Measurement("x", 0.0, 0.0).ratio == 0
    assert Measurement("x", 1e-30, 0.0).ratio == math.inf
    assert Measurement("x", math.nan, 1.0).ratio == math.inf


def test_table_and_page_show_failures() -> None:
    """Declared gaps, reasons for skips and missing backends too."""
    process = ended(
        record("failed", ("the label", 3.0, 1.0), reason="assert '<script>' & more"),
        record("xfailed", reason="a known gap"),
        record("skipped", reason="not here"),
        exit_code=1,
    )
    run = run_of(process)
    page = render_page(run)
    for text in (
        "conformance: failed",
        "a known gap",
        "1: not here",
        "the label: 3.0e+00 (3)",
        "pip install &#39;gradaccum[jax]&#39;",
        "assert &#39;&lt;script&gt;&#39; &amp; more",
    ):
        assert text in page
    assert "<script>" not in page
    assert "FAILED" in printed_table(run)


def test_json_is_strict_and_complete(tmp_path: Path) -> None:
    errors = (("x", math.inf, 1.0), ("y", math.nan, 1.0))
    run = run_of(ended(record("failed", *errors), exit_code=1))
    write_json(tmp_path / "new" / "report.json", run.as_json())
    text = (tmp_path / "new" / "report.json").read_text("utf-8")
    written = json.loads(text, parse_constant=pytest.fail)
    assert written["passed"] is False
    assert written["missing"] == {"jax": "pip install 'gradaccum[jax]'"}
    (failure,) = written["backends"]["torch"]["failures"]
    assert [error["measured"] for error in failure["errors"]] == ["inf", "nan"]


def test_runner_hands_on_records_in_order(tmp_path: Path) -> None:
    """It keeps the last lines of each log."""
    lines = '{"kind": "a"}\nnot json\n[1]\n{"kind": "half'
    script = (
        f"import sys; open(sys.argv[1], 'a').write({lines!r});"
        " print('last words'); sys.exit(3)"
    )
    results = tmp_path / "torch.jsonl"
    job = Job("torch", (sys.executable, "-c", script, str(results)), results)
    kinds = []
    (process,) = run_jobs([job], lambda backend, record: kinds.append(record["kind"]))
    assert process.exit_code == 3
    assert process.log_tail == "last words"
    assert kinds == ["a", "unreadable", "unreadable"]
    assert [record["kind"] for record in process.records] == kinds
