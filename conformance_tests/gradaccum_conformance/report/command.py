"""``gradaccum conformance``: runs the suite on each backend in a process of its own,
and reports.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from gradaccum_conformance.output import require_folder, write_json
from gradaccum_conformance.progress import run_with_progress
from gradaccum_conformance.report.page import write_page
from gradaccum_conformance.report.results import results_of
from gradaccum_conformance.report.run import Run, now
from gradaccum_conformance.report.table import make_table
from gradaccum_conformance.runner import Job
from gradaccum_conformance.selection import install_command, select_backends


def run_conformance(
    console: Console, backends: Sequence[str], directory: Path, *, deep: bool = False
) -> bool:
    """Run the suite on each of `backends` (none named: on all), print the table, write
    page and results to `directory`.

    Returns:
        Whether every test of every backend passed, and every requested backend ran.

    Raises:
        BackendNotFoundError: a name that no backend has.
        SystemExit: nothing can be written to `directory`.
    """
    selection = select_backends(backends)
    require_folder(directory, "--report")
    jobs = [_job(name, directory, deep) for name in selection.chosen]
    results = tuple(
        map(results_of, run_with_progress(jobs, console, total="tests", each="test"))
    )
    passed = all(backend.passed for backend in results) and not selection.failed
    run = Run(results, selection.missing, deep, passed, now())
    write_page(directory / "report.html", run)
    write_json(directory / "report.json", run.as_json())
    _show(console, run)
    console.print(
        Text(f"Written: {directory / 'report.html'} and {directory / 'report.json'}")
    )
    return passed


def _job(backend: str, directory: Path, deep: bool) -> Job:
    results = directory / "raw" / f"{backend}.jsonl"
    command = (
        sys.executable,
        "-m",
        "gradaccum_conformance",
        "--backend",
        backend,
        "--results",
        str(results),
    )
    return Job(backend, (*command, "--deep") if deep else command, results)


def _show(console: Console, run: Run) -> None:
    console.print(make_table(run))
    for name in run.missing:
        console.print(
            Text(
                f"{name} is not installed. Run: {install_command(name)}", style="yellow"
            )
        )
    for results in run.results:
        for test in results.failures:
            console.print(
                Text(
                    f"{results.backend}: {test.name}: {test.reason or test.outcome}",
                    style="red",
                )
            )
        if results.problems:
            console.print(
                Text(
                    f"{results.backend}: {'; '.join(results.problems)}. It printed"
                    " last:",
                    style="bold red",
                )
            )
            console.print(Text(results.log_tail))
