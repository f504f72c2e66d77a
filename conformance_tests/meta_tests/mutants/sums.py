"""Faults in adding and clearing."""

from __future__ import annotations

from typing import Any

import numpy as np

from gradaccum.kit import State

from .planting import Module, around, change_options, mutant, mutants, put

mutants(
    never_clear=lambda m: put(m, clear=lambda sums: None),
    ignore_the_weights=lambda m: put(m, contribution=lambda weight, options: 1.0),
    drop_nothing=lambda m: change_options(
        m, "with_numpy_dtype", 0, on_overflow="skip_window"
    ),
    float32_sums_of_float64=lambda m: put(
        m.Accumulation, _dtype=lambda self, p: np.dtype(np.float32)
    ),
)


@mutant
def clear_by_multiplying(m: Module) -> None:
    def clear(sums: Any) -> None:
        for total in sums.values():
            with np.errstate(invalid="ignore"):
                total *= 0

    m.clear = clear


@mutant
def take_over_the_first_gradient(m: Module) -> None:
    """Its memory, that is, as autograd does with what the first backward pass
    returns.
    """

    def step(
        original: Any, self: Any, gradient: Any, weight: float = 1.0, *told: float
    ) -> None:
        original(self, gradient, weight, *told)
        if self.machine.micro_step == 1 and weight == 1:
            self.sums |= {
                name: g
                for name, g in gradient.items()
                if g is not None and np.array_equal(self.sums[name], g)
            }

    around(m.Accumulation, "step", step)


@mutant
def weigh_dropped_micro_batches(m: Module) -> None:
    def accumulate(
        original: Any, state: Any, weight: Any, finite: Any, where: Any
    ) -> Any:
        return State(*original(state, weight, finite, where))._replace(
            weight=State(*state).weight + weight
        )

    around(m, "accumulate", accumulate)


@mutant
def discard_sum_of_missing_gradient(m: Module) -> None:
    def step(original: Any, self: Any, gradient: Any, *given: float) -> None:
        for name, g in gradient.items():
            if g is None:
                self.sums[name][...] = 0
        original(self, gradient, *given)

    around(m.Accumulation, "step", step)


@mutant
def multiply_by_weight_zero(m: Module) -> None:
    def step(
        original: Any, self: Any, gradient: Any, weight: float = 1.0, *told: float
    ) -> None:
        if weight == 0:
            for name, g in gradient.items():
                with np.errstate(invalid="ignore"):
                    self.sums[name] += 0 * g
        original(self, gradient, weight, *told)

    around(m.Accumulation, "step", step)
