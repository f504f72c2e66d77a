"""Faults in the counters, and in the moment at which a window ends."""

from __future__ import annotations

from typing import Any

import numpy as np

from .planting import Module, around, change_state, mutant, mutants

mutants(
    forget_the_counter_on_discard=lambda m: change_state(
        m, "discard", micro_step=lambda before, after: before.micro_step
    ),
    forget_the_weight_on_discard=lambda m: change_state(
        m, "discard", weight=lambda before, after: before.weight
    ),
    count_micro_batches_as_updates=lambda m: change_state(
        m, "accumulate", optimizer_step=lambda before, after: before.optimizer_step + 1
    ),
    count_skipped_windows_as_updates=lambda m: change_state(
        m, "close", optimizer_step=lambda before, after: before.optimizer_step + 1
    ),
    leave_skipped_windows_uncounted=lambda m: change_state(
        m, "close", skipped_windows=lambda before, after: before.skipped_windows
    ),
    schedule_by_closed_windows=lambda m: around(
        m,
        "ends",
        lambda ends, state, *rest: ends(
            state._replace(optimizer_step=state.optimizer_step + 1), *rest
        ),
    ),
)


@mutant
def run_the_optimizer_every_time(m: Module) -> None:
    def step(original: Any, self: Any, *given: Any) -> None:
        before = self.machine.optimizer_step
        original(self, *given)
        if self.machine.optimizer_step == before:
            self.optimizer.step(
                {
                    name: np.zeros_like(p)
                    for name, p in self.optimizer.parameters.items()
                }
            )

    around(m.Accumulation, "step", step)


@mutant
def count_an_empty_flush(m: Module) -> None:
    def flush(original: Any, self: Any) -> None:
        if self.machine.micro_step == 0:
            self.machine = self.machine._replace(
                skipped_windows=self.machine.skipped_windows + 1
            )
        original(self)

    around(m.Accumulation, "flush", flush)


@mutant
def forget_the_event_at_an_empty_flush(m: Module) -> None:
    def flush(original: Any, self: Any) -> None:
        was_empty = self.machine.micro_step == 0
        original(self)
        if was_empty and self.machine.micro_step == 0:
            self._note()

    around(m.Accumulation, "flush", flush)
