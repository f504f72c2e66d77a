"""Faults in a window's end: the divisor, the norm, clipping, skipping."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from gradaccum.kit import State

from .planting import Module, around, change_decision, change_options, mutant, mutants

mutants(
    divide_a_sum=lambda m: change_decision(
        m, lambda d, state, *_: {"divisor": state.loss_scale * (state.weight or 1.0)}
    ),
    step_on_overflow=lambda m: change_decision(m, lambda *_: {"apply": True}),
    divide_by_anything=lambda m: around(
        m, "decide", lambda decide, *given: decide(*given[:-1], math.inf)
    ),
    ignore_clip_norm=lambda m: change_options(m, "decide", 3, clip_norm=None),
    ignore_skip_norm=lambda m: change_options(m, "decide", 3, skip_norm=None),
    report_the_norm_of_the_sum=lambda m: change_decision(
        m, lambda decision, state, norm, *_: {"grad_norm": norm}
    ),
    unscale_twice=lambda m: change_decision(
        m, lambda decision, state, *_: {"divisor": decision.divisor * state.loss_scale}
    ),
)


@mutant
def divide_the_tail_by_steps(m: Module) -> None:
    def change(
        decision: Any, state: State, norm: Any, finite: Any, options: Any
    ) -> dict[str, Any]:
        short = isinstance(options.steps, int) and options.reduction == "mean"
        return {
            "divisor": decision.divisor * options.steps / state.micro_step
            if short
            else decision.divisor
        }

    change_decision(m, change)


@mutant
def call_large_squares_an_overflow(m: Module) -> None:
    def measure(sums: Any) -> tuple[float, bool]:
        with np.errstate(over="ignore"):
            norm = float(
                np.sqrt(sum(np.square(total).sum() for total in sums.values()))
            )
        return norm, bool(np.isfinite(norm))

    m.measure = measure


@mutant
def clip_every_micro_batch(m: Module) -> None:
    def step(original: Any, self: Any, gradient: Any, *given: Any) -> None:
        limit = self.options.clip_norm
        present = {name: g for name, g in gradient.items() if g is not None}
        norm, finite = m.measure(present) if present else (0.0, True)
        factor = (
            limit * self.machine.loss_scale / norm
            if limit and finite and norm > limit * self.machine.loss_scale
            else 1.0
        )
        original(
            self,
            {name: g * g.dtype.type(factor) for name, g in present.items()},
            *given,
        )

    around(m.Accumulation, "step", step)


@mutant
def clip_the_scaled_gradient(m: Module) -> None:
    def change(
        decision: Any, state: State, norm: Any, finite: Any, options: Any
    ) -> dict[str, Any]:
        limit = options.clip_norm
        return (
            {"divisor": decision.divisor * max(norm / limit, 1.0)}
            if limit and finite
            else {}
        )

    change_decision(m, change)
