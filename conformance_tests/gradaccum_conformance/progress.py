"""A progress bar per backend while their processes run."""

from __future__ import annotations

import os
from collections.abc import Sequence

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)

from gradaccum_conformance.runner import Ended, Job, Record, run_jobs


def run_with_progress(
    jobs: Sequence[Job],
    console: Console,
    *,
    total: str,
    each: str,
    at_once: int = min(2, os.cpu_count() or 1),
) -> list[Ended]:
    """Run `jobs`, two at a time where there are two processors, and show how far each
    is.

    Args:
        jobs: one for each backend.
        console: where the bars are drawn.
        total: the field of a record that holds the number of items to come.
        each: the kind of record that means one more item done.
        at_once: the number of processes at a time; 1 if they are timed.
    """
    with _bars(console) as bars:
        tasks = {
            job.backend: bars.add_task(job.backend, total=None, unit=total)
            for job in jobs
        }

        def on_record(backend: str, record: Record) -> None:
            if total in record:
                bars.update(tasks[backend], total=record[total])
            bars.advance(tasks[backend], int(record["kind"] == each))

        return run_jobs(jobs, on_record, at_once=at_once)


def _bars(console: Console) -> Progress:
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[unit]}"),
    )
    return Progress(*columns, TimeElapsedColumn(), console=console)
