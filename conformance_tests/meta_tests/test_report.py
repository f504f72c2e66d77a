"""The conformance report: nothing that went wrong may look right in it."""

from __future__ import annotations

import io
import json
import math
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from gradaccum_conformance.output import write_json
from gradaccum_conformance.report import BackendResults, Measurement, Run, results_of
from gradaccum_conformance.report.page import render_page
from gradaccum_conformance.report.run import versions
from gradaccum_conformance.report.table import make_table
from gradaccum_conformance.runner import Ended, Job, Record, run_jobs


def record_of(
    name: str,
    outcome: str = "passed",
    property_: str = "weights",
    errors: Any = (),
    reason: str = "",
) -> Record:
    errors = [
        {"label": label, "measured": measured, "bound": bound}
        for label, measured, bound in errors
    ]
    fields = {
        "property": property_,
        "test": name,
        "outcome": outcome,
        "reason": reason,
        "errors": errors,
    }
    return {"kind": "test", "backend": "torch", **fields, "seconds": 0.5}


def ended(
    *tests: Record,
    exit_code: int = 0,
    collected: int | None = None,
    finished: bool = True,
    log: str = "",
) -> Ended:
    first = {
        "kind": "collected",
        "backend": "torch",
        "tests": len(tests) if collected is None else collected,
    }
    last = ({"kind": "finished", "exit_status": exit_code},) if finished else ()
    return Ended("torch", exit_code, (first, *tests, *last), log)


def run_of(*results: BackendResults, missing: tuple[str, ...] = ()) -> Run:
    return Run(
        results,
        missing,
        False,
        all(backend.passed for backend in results),
        "2001-02-03T04:05:06+00:00",
    )


def shown(run: Run, width: int = 120) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(make_table(run))
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]


def test_clean_run_passes() -> None:
    results = results_of(
        ended(record_of("a"), record_of("b", "skipped"), record_of("c", "xfailed"))
    )
    assert results.passed
    assert results.problems == ()


@pytest.mark.parametrize(
    ("process", "problem"),
    [
        (ended(record_of("a"), exit_code=-11), "exit code -11"),
        (ended(record_of("a"), exit_code=1), "exit code 1"),
        (ended(record_of("a"), finished=False), "before it was done"),
        (ended(), "no test"),
        (ended(record_of("a", "skipped")), "no test"),
        (ended(record_of("a"), collected=3), "3 tests were collected, 1 left a result"),
        (Ended("torch", 0, (), ""), "no test"),
        (
            ended(record_of("a"), {"kind": "unreadable", "line": "?"}, collected=1),
            "1 unreadable",
        ),
    ],
)
def test_incomplete_run_fails(process: Ended, problem: str) -> None:
    results = results_of(process)
    assert not results.passed
    assert any(problem in found for found in results.problems)


@pytest.mark.parametrize("outcome", ["failed", "xpassed", "error"])
def test_unknown_outcome_fails(outcome: str) -> None:
    results = results_of(ended(record_of("a"), record_of("b", outcome), exit_code=1))
    assert not results.passed
    assert [test.name for test in results.failures] == ["b"]
    assert results.problems == (), "the exit code is explained by the failure"


@pytest.mark.parametrize(
    ("outcomes", "status", "counts"),
    [
        (["passed", "passed"], "passed", "2 passed"),
        (["passed", "failed", "xpassed"], "failed", "2 failed, 1 passed"),
        (["passed", "xfailed"], "gap", "1 passed, 1 declared gap"),
        (["xfailed", "xfailed"], "gap", "2 declared gaps"),
        (["passed", "skipped"], "passed", "1 passed, 1 skipped"),
        (["skipped"], "skipped", "1 skipped"),
    ],
)
def test_cell_counts_outcomes(outcomes: list[str], status: str, counts: str) -> None:
    tests = [record_of(str(index), outcome) for index, outcome in enumerate(outcomes)]
    cell = results_of(ended(*tests)).cell("weights")
    assert (cell.status, cell.counts) == (status, counts)


def test_worst_error_is_nearest_its_bound() -> None:
    near, far = ("near", 4e-9, 1e-8), ("far", 1e-3, 1.0)
    results = results_of(
        ended(
            record_of("a", errors=[far, near]),
            record_of("b", "xfailed", errors=[("gap", 9.0, 1.0)]),
        )
    )
    worst = results.cell("weights").worst
    assert worst == Measurement(*near)
    assert str(worst) == "4.0e-09 (0.4)"
    assert results.cell("another").worst is None


@pytest.mark.parametrize(
    ("measured", "bound", "ratio"),
    [
        (0.0, 0.0, 0.0),
        (1e-30, 0.0, math.inf),
        (math.nan, 1.0, math.inf),
        (2.0, 1.0, 2.0),
    ],
)
def test_ratio_is_error_over_bound(measured: float, bound: float, ratio: float) -> None:
    assert Measurement("x", measured, bound).ratio == ratio


def test_table_has_properties_by_backends() -> None:
    """A row for each property, a column for each backend."""
    torch = results_of(
        ended(
            record_of("a", errors=[("x", 1.2e-8, 4e-8)]),
            record_of("b", property_="missing_gradients"),
        )
    )
    jax = results_of(ended(record_of("c", "failed"), exit_code=1))._replace(
        backend="jax"
    )
    lines = shown(run_of(torch, jax)).splitlines()
    header = next(line for line in lines if "property" in line)
    assert header.index("torch") < header.index("jax")
    assert any(
        "weights" in line and "1 passed" in line and "1 failed" in line
        for line in lines
    )
    assert any(
        "missing gradients" in line and "1 passed" in line and "-" in line
        for line in lines
    )
    assert any("1.2e-08 (0.3)" in line for line in lines)
    assert any("passed" in line and "FAILED" in line for line in lines)


def test_page_shows_and_escapes_failures() -> None:
    """Declared gaps, reasons for skips and missing backends too."""
    failure = record_of(
        "t[<b>]",
        "failed",
        errors=[("the label", 3.0, 1.0)],
        reason="assert '<script>' & more",
    )
    gap = record_of("g", "xfailed", reason="a known gap")
    skip = record_of("s", "skipped", reason="not here")
    page = render_page(
        run_of(results_of(ended(failure, gap, skip, exit_code=1)), missing=("jax",))
    )
    for text in (
        "conformance: failed",
        "a known gap",
        "1: not here",
        "the label: 3.0e+00 (3)",
        "pip install &#39;gradaccum[jax]&#39;",
    ):
        assert text in page
    assert "<script>" not in page
    assert "assert &#39;&lt;script&gt;&#39; &amp; more" in page


def test_page_of_clean_run_lists_nothing() -> None:
    page = render_page(run_of(results_of(ended(record_of("a")))))
    assert "conformance: passed" in page
    assert "<h2>" not in page


def test_json_is_strict_and_complete(tmp_path: Path) -> None:
    results = results_of(
        ended(
            record_of(
                "a", "failed", errors=[("x", math.inf, 1.0), ("y", math.nan, 1.0)]
            ),
            exit_code=1,
        )
    )
    write_json(
        tmp_path / "new" / "report.json", run_of(results, missing=("jax",)).as_json()
    )
    text = (tmp_path / "new" / "report.json").read_text(encoding="utf-8")

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    written = json.loads(text, parse_constant=refuse)
    assert written["passed"] is False
    assert written["missing"] == {"jax": "pip install 'gradaccum[jax]'"}
    torch = written["backends"]["torch"]
    assert torch["properties"]["weights"]["status"] == "failed"
    assert torch["properties"]["weights"]["worst"]["ratio"] == "inf"
    assert [error["measured"] for error in torch["failures"][0]["errors"]] == [
        "inf",
        "nan",
    ]


def test_versions_are_those_of_the_extra() -> None:
    assert "rich" in versions("conformance")
    assert versions("no-such-extra") == {}


def job(directory: Path, backend: str, script: str) -> Job:
    results = directory / f"{backend}.jsonl"
    return Job(backend, (sys.executable, "-c", script, str(results)), results)


SAY = (
    "import sys; out = open(sys.argv[1], 'a'); say = lambda text: print(text, file=out,"
    " flush=True); "
)


def test_runner_hands_on_records_in_order(tmp_path: Path) -> None:
    """It keeps the last lines of each log."""
    script = (
        SAY
        + "say('{\"kind\": \"a\"}'); say('not json'); say('[1]'); out.write('{\"kind\":"
        " \"half'); print('last words'); sys.exit(3)"
    )
    seen: list[tuple[str, str]] = []
    jobs = [job(tmp_path, name, script) for name in ("one", "two")]
    ended_jobs = run_jobs(
        jobs, lambda backend, record: seen.append((backend, record["kind"])), at_once=1
    )
    expected = ["a", "unreadable", "unreadable"]
    assert seen == [(name, kind) for name in ("one", "two") for kind in expected]
    assert [(end.backend, end.exit_code, end.log_tail) for end in ended_jobs] == [
        ("one", 3, "last words"),
        ("two", 3, "last words"),
    ]
    assert [record["kind"] for record in ended_jobs[0].records] == expected


def test_runner_gives_each_process_one_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless the environment says otherwise."""
    script = "import os; print(os.environ['OMP_NUM_THREADS'])"
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    (alone,) = run_jobs([job(tmp_path, "one", script)], lambda backend, record: None)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    (told,) = run_jobs([job(tmp_path, "one", script)], lambda backend, record: None)
    assert (alone.log_tail, told.log_tail) == ("1", "3")


def test_interrupted_runner_ends_its_processes(tmp_path: Path) -> None:
    script = (
        SAY + 'import os, time; say(\'{"kind": "pid", "pid": %d}\' % os.getpid());'
        " time.sleep(600)"
    )
    pids: list[int] = []

    def interrupt(backend: str, record: Record) -> None:
        pids.append(record["pid"])
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_jobs([job(tmp_path, "one", script)], interrupt)
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)
