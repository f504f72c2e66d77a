"""What `gradaccum.verify` found: readable as text, as a table in colours, and by programs as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib import import_module
from typing import Any

from gradaccum.errors import GradAccumError, explain

PAGE = "gradaccum/VERIFY.md"
"""The page with a section for each kind of cause."""


class MissingPackageError(GradAccumError, ImportError):
    """A package that only this call needs is not installed."""


@dataclass(frozen=True)
class Cause:
    """One reason why accumulation gives another gradient than the large batch."""

    kind: str
    """One word with underscores; `PAGE` has a section of that name."""
    where: str
    """The layer, state, parameter or part of the batch; "the loss" where no smaller part is known."""
    explanation: str
    """What was seen, and why it makes a difference."""
    fix: str
    """What to write instead."""

    def __str__(self) -> str:
        return f"{self.kind} ({self.where}): {self.explanation}\n    What to do: {self.fix}"


@dataclass(frozen=True)
class VerificationReport:
    """The findings of `gradaccum.verify`."""

    equivalent: bool
    """Whether accumulation is right for this loss: its gradient did not move, and nothing else was found that breaks it."""
    causes: tuple[Cause, ...]
    """Why not, in the order in which they were found; empty if `equivalent`."""
    errors: Mapping[str, float]
    """By parameter: how far the gradient moved under the worst partition, in its unit; inf if it is not finite under one."""
    units: Mapping[str, float]
    """By parameter: by how much rounding alone moves the gradient, in the 2-norm."""
    limit: float
    """How many units are still rounding."""
    partitions: tuple[str, ...]
    """The partitions and orders of the batch that were compared, in words."""
    notes: tuple[str, ...] = ()
    """What is no mistake, but good to know."""

    @property
    def moved(self) -> tuple[str, ...]:
        """Names of the parameters whose gradient moved by more than rounding."""
        return tuple(name for name, error in self.errors.items() if not error <= self.limit)

    def __str__(self) -> str:
        lines = [self._verdict(), *(f"  {cause}" for cause in self.causes), *(f"  note: {note}" for note in self.notes)]
        if self.moved:
            worst = sorted(self.moved, key=lambda name: -self.errors[name])
            shown = ", ".join(f"{name} {_short(self.errors[name])}" for name in worst[:5])
            more = f" and {len(worst) - 5} more" if len(worst) > 5 else ""
            lines.append(f"  Parameters that moved, in units of rounding (up to {self.limit:g} is rounding alone): {shown}{more}")
        if self.causes:
            lines.append(f"  More about each cause: {PAGE}.")
        return "\n".join(lines)

    def to_json(self) -> str:
        """The report as a JSON text; a number that JSON cannot hold is the text "inf"."""
        content = asdict(self)
        for field in ("errors", "units"):
            content[field] = {name: value if math.isfinite(value) else "inf" for name, value in content[field].items()}
        return json.dumps({**content, "moved": list(self.moved)}, indent=2)

    def table(self) -> Any:
        """The report as a `rich.table.Table`, for ``rich.print``: a line per parameter, the causes below.

        Raises:
            MissingPackageError: rich is not installed.
        """
        try:
            text, table = import_module("rich.text").Text, import_module("rich.table").Table
        except ModuleNotFoundError as missing:
            fix = "Run: pip install rich; or print the report itself."
            raise explain(
                MissingPackageError, "report.table()", expected="the package 'rich'", found="none installed", fix=fix
            ) from missing
        # As texts, not as strings: rich would read "batch[mask]" as markup.
        made = table(title=text(self._verdict()), caption=text("\n".join(map(str, self.causes))))
        made.add_column("parameter", overflow="fold")
        for heading in ("moved, in units", "unit"):
            made.add_column(heading, justify="right")
        for name, error in self.errors.items():
            made.add_row(text(name), _short(error), f"{self.units[name]:.2g}", style="" if error <= self.limit else "bold red")
        return made

    def _verdict(self) -> str:
        if self.equivalent:
            return f"Accumulation is right for this loss: {len(self.errors)} parameters, {len(self.partitions)} partitions compared."
        found = ", ".join(dict.fromkeys(cause.kind for cause in self.causes))
        if found == "randomness":
            return "Accumulation cannot be compared for this loss: randomness."
        return f"Accumulation is WRONG for this loss: {found}."


def _short(error: float) -> str:
    return "not finite" if not math.isfinite(error) else f"{error:.3g}"
