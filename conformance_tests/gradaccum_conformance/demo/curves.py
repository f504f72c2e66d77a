"""The curves of the demo's runs, and their faults."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any, NamedTuple

from gradaccum_conformance.demo.recipes import RECIPES, Recipe
from gradaccum_conformance.runner import Ended, Record

REQUIRED_ACCURACY = 0.96
ALLOWED_DIFFERENCE = 1e-4
"""Between rounding (float32 leaves about 1e-6 after these few hundred updates) and one
window divided by the wrong number (about 1e-1).
"""


class Curve(NamedTuple):
    """One run of one backend, a value for each epoch."""

    backend: str
    recipe: Recipe
    losses: list[float]
    """Mean cross-entropy over the training items."""
    accuracies: list[float]
    """On the test items, in [0, 1]."""
    differences: list[float]
    """Largest absolute difference of any parameter to the large-batch run's."""

    @property
    def faults(self) -> list[str]:
        """Its faults, in words. The naive loop has none: nothing is required of it."""
        found = []
        if self.recipe.exact and not self.accuracies[-1] > REQUIRED_ACCURACY:
            found.append(f"accuracy not above {REQUIRED_ACCURACY:.0%}")
        if self.recipe.exact and not self.differences[-1] <= ALLOWED_DIFFERENCE:
            found.append(f"differs by more than {ALLOWED_DIFFERENCE:g}")
        return found

    def as_json(self) -> dict[str, Any]:
        names = ("losses", "accuracies", "differences")
        return {
            "backend": self.backend,
            "run": self.recipe.name,
            "faults": self.faults,
            **{name: getattr(self, name) for name in names},
        }


def curves_of(ended: Iterable[Ended]) -> list[Curve]:
    """A curve for each run that got through at least one epoch, backend by backend, in
    the order of the recipes.
    """
    curves = [
        _curve(process.backend, recipe, process.records)
        for process in ended
        for recipe in RECIPES
    ]
    return [curve for curve in curves if curve.losses]


def problem_of(ended: Ended) -> str | None:
    """Why a backend's process gave no full result, in words; None if it did."""
    if ended.exit_code:
        return f"its process ended with exit code {ended.exit_code}"
    kinds = Counter(record["kind"] for record in ended.records)
    planned = sum(
        int(record["epochs"]) for record in ended.records if record["kind"] == "started"
    )
    done = kinds["finished"] and kinds["epoch"] == planned > 0
    return (
        None
        if done
        else f"its process ended after {kinds['epoch']} of {planned} epochs"
    )


def _curve(backend: str, recipe: Recipe, records: Iterable[Record]) -> Curve:
    epochs = [
        record
        for record in records
        if record["kind"] == "epoch" and record["run"] == recipe.name
    ]
    values = (
        [epoch[field] for epoch in epochs]
        for field in ("loss", "accuracy", "difference")
    )
    return Curve(backend, recipe, *values)
