"""``gradaccum demo``: runs each framework in a process of its own, and shows the
results.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from gradaccum_conformance.demo.curves import Curve, curves_of, problem_of
from gradaccum_conformance.demo.plot import write_plot
from gradaccum_conformance.demo.table import CAPTION, make_table
from gradaccum_conformance.output import require_folder, write_json
from gradaccum_conformance.progress import run_with_progress
from gradaccum_conformance.runner import Ended, Job
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
        console.print(
            Text(
                f"{name} is not installed. Run: {install_command(name)}", style="yellow"
            )
        )
    ended = run_with_progress(
        [_job(name, out) for name in selection.chosen],
        console,
        total="epochs",
        each="epoch",
    )
    curves = curves_of(ended)
    _show(console, curves, ended)
    if curves:
        _write(console, curves, ended, selection.missing, out)
    return not (
        selection.failed
        or any(map(problem_of, ended))
        or any(curve.faults for curve in curves)
    )


def _job(backend: str, out: Path) -> Job:
    results = out / "raw" / f"{backend}.jsonl"
    command = (
        sys.executable,
        "-m",
        "gradaccum_conformance.demo",
        "--backend",
        backend,
        "--results",
        str(results),
    )
    return Job(backend, command, results)


def _show(console: Console, curves: Sequence[Curve], ended: Sequence[Ended]) -> None:
    if curves:
        console.print(make_table(curves))
        console.print(Text(CAPTION, style="dim"))
    for process in ended:
        if problem := problem_of(process):
            console.print(
                Text(
                    f"{process.backend}: {problem}. It printed last:", style="bold red"
                )
            )
            console.print(Text(process.log_tail))


def _write(
    console: Console,
    curves: Sequence[Curve],
    ended: Sequence[Ended],
    missing: Sequence[str],
    out: Path,
) -> None:
    write_plot(out / "curves.png", curves)
    problems = {
        process.backend: problem
        for process in ended
        if (problem := problem_of(process))
    }
    write_json(
        out / "results.json",
        {
            "runs": [curve.as_json() for curve in curves],
            "missing": missing,
            "problems": problems,
        },
    )
    console.print(Text(f"Written: {out / 'curves.png'} and {out / 'results.json'}"))
