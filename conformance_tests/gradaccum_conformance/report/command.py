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
    processes = run_with_progress(jobs, console, total="tests", each="test")
    results = tuple(map(results_of, processes))
    passed = all(backend.passed for backend in results) and not selection.failed
    run = Run(results, selection.missing, deep, passed, now())
    page = directory / "report.html"
    data = directory / "report.json"
    write_page(page, run)
    write_json(data, run.as_json())
    console.print(make_table(run))
    for name in run.missing:
        words = f"{name} is not installed. Run: {install_command(name)}"
        console.print(Text(words, style="yellow"))
    for backend in results:
        for test in backend.failures:
            words = f"{backend.backend}: {test.name}: {test.reason or test.outcome}"
            console.print(Text(words, style="red"))
        if backend.problems:
            problems = "; ".join(backend.problems)
            words = f"{backend.backend}: {problems}. It printed last:"
            console.print(Text(words, style="bold red"))
            console.print(Text(backend.log_tail))
    console.print(Text(f"Written: {page} and {data}"))
    return passed


def _job(backend: str, directory: Path, deep: bool) -> Job:
    results = directory / "raw" / f"{backend}.jsonl"
    module = (sys.executable, "-m", "gradaccum_conformance")
    command = (*module, "--backend", backend, "--results", str(results))
    return Job(backend, (*command, "--deep") if deep else command, results)
