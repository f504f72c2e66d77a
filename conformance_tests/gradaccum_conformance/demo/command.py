"""``gradaccum demo``: runs each framework in a process of its own, and shows the
results.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from gradaccum_conformance.demo.curves import curves_of, problem_of
from gradaccum_conformance.demo.plot import write_plot
from gradaccum_conformance.demo.table import CAPTION, make_table
from gradaccum_conformance.output import require_folder, write_json
from gradaccum_conformance.progress import run_with_progress
from gradaccum_conformance.runner import Job
from gradaccum_conformance.selection import install_command, select_backends

REFERENCE = "numpy"
"""The executable specification is no framework, so it runs only if the user names it.
"""


def run_demo(console: Console, backends: Sequence[str], out: Path) -> bool:
    """Train in each of `backends` (none named: in every framework), print the table,
    write picture and results to `out`.

    Returns:
        Whether every requested framework ran, and every run that must agree with the
        large batch is accurate and agrees.

    Raises:
        BackendNotFoundError: a name that no backend has.
        SystemExit: nothing can be written to `out`.
    """
    selection = select_backends(backends, leave_out={REFERENCE})
    require_folder(out, "--out")
    for name in selection.missing:
        words = f"{name} is not installed. Run: {install_command(name)}"
        console.print(Text(words, style="yellow"))
    jobs = [_job(name, out) for name in selection.chosen]
    processes = run_with_progress(jobs, console, total="epochs", each="epoch")
    curves = curves_of(processes)
    if curves:
        console.print(make_table(curves))
        console.print(Text(CAPTION, style="dim"))
    problems = {}
    for process in processes:
        if problem := problem_of(process):
            problems[process.backend] = problem
            words = f"{process.backend}: {problem}. It printed last:"
            console.print(Text(words, style="bold red"))
            console.print(Text(process.log_tail))
    if curves:
        picture = out / "curves.png"
        results = out / "results.json"
        write_plot(picture, curves)
        runs = [curve.as_json() for curve in curves]
        missing = selection.missing
        write_json(results, {"runs": runs, "missing": missing, "problems": problems})
        console.print(Text(f"Written: {picture} and {results}"))
    faults = any(curve.faults for curve in curves)
    return not (selection.failed or problems or faults)


def _job(backend: str, out: Path) -> Job:
    results = out / "raw" / f"{backend}.jsonl"
    module = (sys.executable, "-m", "gradaccum_conformance.demo")
    command = (*module, "--backend", backend, "--results", str(results))
    return Job(backend, command, results)
