"""Faults in the memory of overflows and in the moves of the loss scale."""

from __future__ import annotations

from typing import Any

from gradaccum.kit import State

from .planting import Module, around, change_decision, change_state, mutant, mutants

mutants(
    back_off_when_skipping_by_norm=lambda m: change_decision(
        m, lambda decision, *_: {"overflow": not decision.apply}
    ),
    move_the_scale_per_micro_batch=lambda m: change_state(
        m,
        "accumulate",
        loss_scale=lambda before, after: (
            before.loss_scale * (0.5 if after.overflow else 1.0)
        ),
    ),
    forget_overflow_at_next_micro_batch=lambda m: around(
        m,
        "accumulate",
        lambda original, state, weight, finite, where: State(
            *original(state, weight, finite, where)
        )._replace(overflow=not finite),
    ),
    grow_after_an_overflow=lambda m: change_state(
        m, "close", growth_tracker=lambda before, after: (before.growth_tracker + 1) % 2
    ),
)


@mutant
def lower_scale_below_its_floor(m: Module) -> None:
    def halved(before: State, after: State) -> Any:
        return (
            before.loss_scale / 2
            if after.growth_tracker == 0
            and after.loss_scale == before.loss_scale == 1.0
            else after.loss_scale
        )

    change_state(m, "close", loss_scale=halved)


@mutant
def raise_scale_above_its_ceiling(m: Module) -> None:
    def close(
        original: Any, state: Any, apply: Any, overflow: Any, options: Any, where: Any
    ) -> Any:
        return original(
            state,
            apply,
            overflow,
            options._replace(
                scale_rule=options.scale_rule._replace(max_scale=float("inf"))
            ),
            where,
        )

    around(m, "close", close)
