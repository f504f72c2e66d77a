"""The demo's results in the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from rich.table import Table
from rich.text import Text

from gradaccum_conformance.demo.curves import REQUIRED_ACCURACY, Curve
from gradaccum_conformance.demo.recipes import STEPS


def make_table(curves: Sequence[Curve]) -> Table:
    """A row for each run: its accuracy, and the distance of its parameters from the
    large-batch run's.
    """
    table = Table(
        title="Handwritten digits: one large batch, and the same batch in micro-batches"
    )
    for header, justify in (
        ("backend", "left"),
        ("run", "left"),
        ("accuracy", "right"),
        ("difference", "right"),
    ):
        table.add_column(header, justify=justify)  # type: ignore[arg-type]
    table.add_column("correct")
    ends = {
        a
        for a, b in pairwise(range(len(curves)))
        if curves[a].backend != curves[b].backend
    }
    for index, curve in enumerate(curves):
        table.add_row(*_row(curve), end_section=index in ends)
    return table


def _row(curve: Curve) -> tuple[str | Text, ...]:
    difference = "0" if curve.differences[-1] == 0 else f"{curve.differences[-1]:.1e}"
    return (
        curve.backend,
        curve.recipe.name,
        f"{curve.accuracies[-1]:.2%}",
        difference,
        _verdict(curve),
    )


def _verdict(curve: Curve) -> Text:
    if not curve.recipe.exact:
        return Text("(for contrast)", style="dim")
    return (
        Text("no: " + ", ".join(curve.faults), style="bold red")
        if curve.faults
        else Text("yes", style="green")
    )


CAPTION = (
    "Accuracy is on digits held back from training. The difference is the largest of"
    " any parameter from the large-batch run's. Runs must end above"
    f" {REQUIRED_ACCURACY:.0%} and differ by rounding only. The naive loop divides"
    f" every window by {STEPS}: the short window that ends each epoch updates with"
    " about half of its gradient, and no error says so."
)
