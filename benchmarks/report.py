"""The measurements as a table, as JSON, as plots and as one page that needs no other
file.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from rich.table import Table

from benchmarks.answers import TEXTS, Answers
from benchmarks.machine import machine
from benchmarks.plots import write_plots
from gradaccum_conformance.output import write_json

TEMPLATES = Path(__file__).parent / "templates"


def make_table(answers: Answers) -> Table:
    """The answers for the terminal."""
    table = Table(title=answers.title)
    for column in answers.columns:
        table.add_column(column, justify="left" if column in TEXTS else "right")
    for row in answers.rows():
        table.add_row(*row)
    return table


def write_report(out: Path, answers: Sequence[Answers]) -> None:
    """Write ``results.json``, a PNG for each plot and ``report.html``, which holds them
    all, to `out`.
    """
    here = machine()
    write_json(
        out / "results.json",
        {
            "machine": here,
            "cases": [record for answer in answers for record in answer.records],
        },
    )
    plots = {
        answer.question: [_as_base64(path) for path in write_plots(answer, out)]
        for answer in answers
    }
    loader = FileSystemLoader(TEMPLATES)
    page = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True
    ).get_template("report.html")
    (out / "report.html").write_text(
        page.render(machine=here, answers=answers, plots=plots), encoding="utf-8"
    )


def _as_base64(path: Path) -> str:
    return base64.b64encode(path.read_bytes()).decode()
