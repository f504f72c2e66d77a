"""Faults in saving, in loading and in checks of the input."""

from __future__ import annotations

from typing import Any

import numpy as np

from gradaccum.kit import State
from gradaccum_conformance.reference.harness import NumpySession

from .planting import Module, mutant


@mutant
def save_without_the_sums(m: Module) -> None:
    def getstate(self: Any) -> dict[str, Any]:
        return {**self.__dict__, "sums": {name: np.zeros_like(total) for name, total in self.sums.items()}}

    m.Accumulation.__getstate__ = getstate


@mutant
def load_without_checks(m: Module) -> None:
    from gradaccum_conformance.reference import harness

    harness._require_same_shapes = lambda loaded, own: None


@mutant
def resume_under_any_terms(m: Module) -> None:
    from gradaccum_conformance.reference import harness

    original = harness.resumed
    harness.resumed = lambda fields, saved, options: fields if fields.micro_step else original(fields, saved, options)


@mutant
def resume_with_the_saved_scale(m: Module) -> None:
    from gradaccum_conformance.reference import harness

    original = harness.resumed
    harness.resumed = lambda fields, saved, options: original(fields, saved, options) if fields.micro_step else fields


@mutant
def take_any_size(m: Module) -> None:
    m.require_steps = lambda steps, optimizer_step, schedule: steps


@mutant
def take_any_weight(m: Module) -> None:
    from gradaccum_conformance.reference import harness

    harness.require_weight = float


@mutant
def take_any_gradient(m: Module) -> None:
    from gradaccum_conformance.reference import harness

    harness._checked = lambda name, g, parameters: np.resize(g, parameters[name].shape) if name in parameters else g


def save_without(field: str) -> None:
    def plant(m: Module) -> None:
        original = NumpySession.load

        def load(self: Any, directory: Any) -> None:
            fresh = getattr(self.accumulation.machine, field)
            original(self, directory)
            self.accumulation.machine = self.accumulation.machine._replace(**{field: fresh})

        NumpySession.load = load

    plant.__name__ = f"save_without_{field}"
    mutant(plant)


for _field in State._fields:
    save_without(_field)
