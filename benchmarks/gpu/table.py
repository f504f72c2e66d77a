"""The results as one table on the terminal: with rich if it is installed, plain
otherwise.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from benchmarks.gpu.records import BAD, FIGURE, PASS, Record, Run, is_installed
from benchmarks.gpu.stages import STAGES

COLUMNS = ("check", "result", "measured", "bound", "the bare loop", "Accelerate")

WIDTH_OF_A_FILE = 160


def cells(record: Record) -> tuple[str, ...]:
    """Return a record's cells, in the order of `COLUMNS`."""
    return (
        record.check,
        record.status,
        record.measured,
        record.bound,
        record.bare,
        record.accelerate,
    )


def by_stage(run: Run) -> list[tuple[str, list[Record]]]:
    """Return the titles of the stages that have records, with their records."""
    found = []
    for stage in STAGES:
        records = [record for record in run.records if record.stage == stage.name]
        if records:
            found.append((stage.title, records))
    return found


def counted(run: Run) -> str:
    """Return how many checks had which result, in words."""
    counts = Counter(record.status for record in run.records)
    order = [PASS, *BAD, FIGURE]
    statuses = sorted(counts, key=lambda each: (each not in order, each))
    return ", ".join(f"{counts[status]} {status}" for status in statuses)


def print_table(run: Run) -> None:
    if is_installed("rich"):
        _print_rich(run)
    else:
        print(plain_table(run))
    print(counted(run))


def _print_rich(run: Run) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH_OF_A_FILE)
    for title, records in by_stage(run):
        table = Table(title=title, title_justify="left", expand=False)
        for column in COLUMNS:
            table.add_column(column, overflow="fold")
        for record in records:
            style = "bold red" if record.status in BAD else ""
            table.add_row(*map(Text, cells(record)), style=style)
        console.print(table)


def plain_table(run: Run) -> str:
    """Return the table as text, with columns of equal width."""
    rows: list[tuple[str, ...]] = [COLUMNS]
    for _, records in by_stage(run):
        rows += map(cells, records)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [_line(COLUMNS, widths), _line(["-" * width for width in widths], widths)]
    for title, records in by_stage(run):
        lines += ["", title]
        lines += [_line(cells(record), widths) for record in records]
    return "\n".join(lines)


def _line(texts: Sequence[str], widths: Sequence[int]) -> str:
    pairs = zip(texts, widths, strict=True)
    return "  ".join(text.ljust(width) for text, width in pairs).rstrip()
