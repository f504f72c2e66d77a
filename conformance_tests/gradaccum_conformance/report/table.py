"""The report in the terminal: a row for each property, a column for each backend."""

from __future__ import annotations

from rich.table import Table
from rich.text import Text

from gradaccum_conformance.report.results import BackendResults, Cell
from gradaccum_conformance.report.run import Run

STYLES = {
    "failed": "bold red",
    "gap": "yellow",
    "passed": "green",
    "skipped": "dim",
    "none": "dim",
}


def make_table(run: Run) -> Table:
    """Each backend's outcomes on each property, and its worst error: as measured (share
    of its bound).
    """
    table = Table(
        title="Conformance",
        caption=(
            "Below the counts: the worst error found, as measured (share of its bound)"
        ),
        show_lines=True,
    )
    table.add_column("property")
    for results in run.results:
        table.add_column(results.backend)
    for name in run.properties:
        table.add_row(
            title_of(name), *(_text(results.cell(name)) for results in run.results)
        )
    table.add_row("all", *(_total(results) for results in run.results))
    return table


def title_of(name: str) -> str:
    """A property's name in words."""
    return name.replace("_", " ")


def _text(cell: Cell) -> Text:
    text = Text(cell.counts or "-", style=STYLES[cell.status])
    if cell.worst:
        text.append(
            f"\n{cell.worst}", style="red" if cell.worst.ratio > 1 else "default"
        )
    return text


def _total(results: BackendResults) -> Text:
    everything = Cell(results.tests)
    verdict = Text(
        "passed" if results.passed else "FAILED",
        style="bold green" if results.passed else "bold red",
    )
    return verdict.append(
        f"\n{everything.counts}" if results.tests else "", style="default"
    )
