"""Faults in saving, in loading and in checks of the input."""

from __future__ import annotations

from typing import Any

import numpy as np

from gradaccum.kit import State
from gradaccum_conformance.reference import harness
from gradaccum_conformance.reference.harness import NumpySession

from .planting import Module, around, mutant, mutants, put

mutants(
    save_without_the_sums=lambda m: put(
        m.Accumulation,
        __getstate__=lambda self: {
            **self.__dict__,
            "sums": {name: np.zeros_like(total) for name, total in self.sums.items()},
        },
    ),
    load_without_checks=lambda m: put(
        harness, _require_same_shapes=lambda loaded, own: None
    ),
    resume_under_any_terms=lambda m: around(
        harness,
        "resumed",
        lambda resumed, fields, *given: (
            fields if fields.micro_step else resumed(fields, *given)
        ),
    ),
    resume_with_the_saved_scale=lambda m: around(
        harness,
        "resumed",
        lambda resumed, fields, *given: (
            resumed(fields, *given) if fields.micro_step else fields
        ),
    ),
    take_any_size=lambda m: put(
        m, require_steps=lambda steps, optimizer_step, schedule: steps
    ),
    take_any_weight=lambda m: put(harness, require_weight=float),
    take_any_gradient=lambda m: put(
        harness,
        _checked=lambda name, g, parameters: (
            np.resize(g, parameters[name].shape) if name in parameters else g
        ),
    ),
)


@mutant
def report_the_last_window_after_an_empty_flush(m: Module) -> None:
    def flush(original: Any, self: Any, denominator: Any = None) -> None:
        before = self.result
        original(self, denominator)
        if not self.result.closed:
            self.result = before

    around(m.Accumulation, "flush", flush)


def save_without(field: str) -> None:
    def plant(m: Module) -> None:
        def load(original: Any, self: Any, directory: Any) -> None:
            fresh = getattr(self.accumulation.machine, field)
            original(self, directory)
            self.accumulation.machine = self.accumulation.machine._replace(
                **{field: fresh}
            )

        around(NumpySession, "load", load)

    mutants(**{f"save_without_{field}": plant})


for _field in State._fields:
    save_without(_field)
