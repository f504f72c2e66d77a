"""The curves of the demo's runs, and their faults."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from gradaccum_conformance.demo.recipes import RECIPES, Recipe
from gradaccum_conformance.runner import Ended

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
        faults = []
        if self.recipe.exact and not self.accuracies[-1] > REQUIRED_ACCURACY:
            faults.append(f"accuracy not above {REQUIRED_ACCURACY:.0%}")
        if self.recipe.exact and not self.differences[-1] <= ALLOWED_DIFFERENCE:
            faults.append(f"differs by more than {ALLOWED_DIFFERENCE:g}")
        return faults

    def as_json(self) -> dict[str, Any]:
        names = {"run": self.recipe.name, "faults": self.faults}
        values = self._asdict()
        del values["recipe"]
        return {**names, **values}


def curves_of(processes: Iterable[Ended]) -> list[Curve]:
    """A curve for each run that got through at least one epoch, backend by backend, in
    the order of the recipes.
    """
    curves = []
    for process in processes:
        for recipe in RECIPES:
            curve = Curve(process.backend, recipe, [], [], [])
            for record in process.records:
                if record["kind"] == "epoch" and record["run"] == recipe.name:
                    curve.losses.append(record["loss"])
                    curve.accuracies.append(record["accuracy"])
                    curve.differences.append(record["difference"])
            if curve.losses:
                curves.append(curve)
    return curves


def problem_of(process: Ended) -> str | None:
    """Why a backend's process gave no full result, in words; None if it did."""
    if process.exit_code:
        return f"its process ended with exit code {process.exit_code}"
    kinds = [record["kind"] for record in process.records]
    planned = process.records[0]["epochs"] if "started" in kinds else 0
    if "finished" in kinds and kinds.count("epoch") == planned > 0:
        return None
    return f"its process ended after {kinds.count('epoch')} of {planned} epochs"
