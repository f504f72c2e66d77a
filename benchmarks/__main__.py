"""``python -m benchmarks [--quick] [--only NAME ...] [--out DIR] [--readme]``: one
process for each question, one after another.
"""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path
from shutil import which
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from benchmarks.answers import Answers
from benchmarks.case import QUESTIONS
from benchmarks.readme import write_readme
from benchmarks.report import make_table, write_report
from gradaccum_conformance.progress import run_with_progress
from gradaccum_conformance.runner import Ended, Job

KEEP_MEMORY = {
    "MALLOC_TRIM_THRESHOLD_": str(2**40),
    "MALLOC_MMAP_THRESHOLD_": str(2**40),
}
"""For glibc: freed memory is kept. Otherwise it depends on how the heap happens to lie
which contestant gives its gradients back to the system and pays for page faults in the
next window; that is up to a tenth of a window, more than what is asked about.
"""


def main(
    quick: Annotated[
        bool, typer.Option("--quick", help="Small sizes and few rounds.")
    ] = False,
    only: Annotated[
        list[str],
        typer.Option(help=f"Questions, one or several. Known: {', '.join(QUESTIONS)}."),
    ] = [],  # noqa: B006
    more: Annotated[
        list[str], typer.Argument(help="Further questions, after --only.", hidden=True)
    ] = [],  # noqa: B006
    out: Annotated[Path, typer.Option(help="Folder for the results.")] = Path(
        "benchmark-results"
    ),
    readme: Annotated[
        bool,
        typer.Option(
            "--readme",
            help=(
                "Also write the tables of benchmarks/README.md and the front page's"
                " plot."
            ),
        ),
    ] = False,
) -> None:
    """Measure, print the tables and write results.json, a PNG for each plot and
    report.html.
    """
    asked = [*only, *more]
    if unknown := set(asked) - set(QUESTIONS):
        raise typer.BadParameter(
            f"--only: expected some of {', '.join(QUESTIONS)}; got"
            f" {', '.join(sorted(unknown))}."
        )
    console = Console()
    os.environ.update(KEEP_MEMORY)
    names = [name for name in asked or _usual() if _can_be_asked(name, console)]
    ended = run_with_progress(
        [_job(name, out, quick) for name in names],
        console,
        total="cases",
        each="case",
        at_once=1,
    )
    answers = [Answers(process.backend, process.records) for process in ended]
    for answer in answers:
        console.print(make_table(answer))
    write_report(out, answers)
    if readme:
        write_readme(answers)
    console.print(Text(f"Written: {out / 'report.html'} and {out / 'results.json'}"))
    raise typer.Exit(int(any(_failed(process, console) for process in ended)))


def _usual() -> list[str]:
    """All questions; those about GPUs only where there is one."""
    return [
        name
        for name, entry in QUESTIONS.items()
        if which("nvidia-smi") or not entry.gpu
    ]


def _can_be_asked(name: str, console: Console) -> bool:
    missing = [package for package in QUESTIONS[name].needs if not find_spec(package)]
    if missing:
        console.print(
            Text(
                f"{name} needs {', '.join(missing)}, which is not installed.",
                style="yellow",
            )
        )
    return not missing


def _job(name: str, out: Path, quick: bool) -> Job:
    results = out / "raw" / f"{name}.jsonl"
    command = (
        sys.executable,
        "-m",
        "benchmarks.run_question",
        name,
        "--results",
        str(results),
        *(["--quick"] if quick else []),
    )
    return Job(name, command, results)


def _failed(process: Ended, console: Console) -> bool:
    if process.exit_code:
        console.print(
            Text(
                f"{process.backend} failed. It printed last:\n{process.log_tail}",
                style="bold red",
            )
        )
    return bool(process.exit_code)


if __name__ == "__main__":
    typer.run(main)
