"""Faults in the counters, and in the moment at which a window ends."""

from __future__ import annotations

from typing import Any

import numpy as np

from .planting import Module, change_state, mutant


@mutant
def forget_the_counter_on_discard(m: Module) -> None:
    change_state(m, "discard", micro_step=lambda before, after: before.micro_step)


@mutant
def forget_the_weight_on_discard(m: Module) -> None:
    change_state(m, "discard", weight=lambda before, after: before.weight)


@mutant
def count_micro_batches_as_updates(m: Module) -> None:
    change_state(m, "accumulate", optimizer_step=lambda before, after: before.optimizer_step + 1)


@mutant
def count_skipped_windows_as_updates(m: Module) -> None:
    change_state(m, "close", optimizer_step=lambda before, after: before.optimizer_step + 1)


@mutant
def leave_skipped_windows_uncounted(m: Module) -> None:
    change_state(m, "close", skipped_windows=lambda before, after: before.skipped_windows)


@mutant
def run_the_optimizer_every_time(m: Module) -> None:
    original = m.Accumulation.step

    def step(self: Any, gradient: Any, weight: float = 1.0, *told: float) -> None:
        before = self.machine.optimizer_step
        original(self, gradient, weight, *told)
        if self.machine.optimizer_step == before:
            self.optimizer.step({name: np.zeros_like(p) for name, p in self.optimizer.parameters.items()})

    m.Accumulation.step = step


@mutant
def count_an_empty_flush(m: Module) -> None:
    original = m.Accumulation.flush

    def flush(self: Any) -> None:
        if self.machine.micro_step == 0:
            self.machine = self.machine._replace(skipped_windows=self.machine.skipped_windows + 1)
        original(self)

    m.Accumulation.flush = flush


@mutant
def forget_the_event_at_an_empty_flush(m: Module) -> None:
    original = m.Accumulation.flush

    def flush(self: Any) -> None:
        was_empty = self.machine.micro_step == 0
        original(self)
        if was_empty and self.machine.micro_step == 0:
            self._note()

    m.Accumulation.flush = flush


@mutant
def schedule_by_closed_windows(m: Module) -> None:
    original = m.ends
    m.ends = lambda state, steps, where: original(state._replace(optimizer_step=state.optimizer_step + 1), steps, where)
