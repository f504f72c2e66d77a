"""The demo's results in the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from gradaccum_conformance.demo.curves import REQUIRED_ACCURACY, Curve
from gradaccum_conformance.demo.recipes import STEPS

CAPTION = (
    "Accuracy is on digits held back from training. The difference is the largest of"
    " any parameter from the large-batch run's. Runs must end above"
    f" {REQUIRED_ACCURACY:.0%} and differ by rounding only. The naive loop divides"
    f" every window by {STEPS}: the short window that ends each epoch updates with"
    " about half of its gradient, and no error says so."
)


def make_table(curves: Sequence[Curve]) -> Table:
    """A row for each run: its accuracy, and the distance of its parameters from the
    large-batch run's.
    """
    table = Table(
        title="Handwritten digits: one large batch, and the same batch in micro-batches"
    )
    for header in ("backend", "run"):
        table.add_column(header)
    for header in ("accuracy", "difference"):
        table.add_column(header, justify="right")
    table.add_column("correct")
    backend = ""
    for curve in curves:
        if backend not in ("", curve.backend):
            table.add_section()
        backend = curve.backend
        table.add_row(
            backend,
            curve.recipe.name,
            f"{curve.accuracies[-1]:.2%}",
            f"{curve.differences[-1]:.1e}",
            _verdict(curve),
        )
    return table


def _verdict(curve: Curve) -> Text:
    if not curve.recipe.exact:
        return Text("(for contrast)", style="dim")
    if curve.faults:
        return Text("no: " + ", ".join(curve.faults), style="bold red")
    return Text("yes", style="green")
