"""Faults in what a window knows besides its gradient: its loss, its end by weight, and
that it need not look at its gradient.
"""

from __future__ import annotations

from typing import Any

from gradaccum.kit import State, UntilWeight

from .planting import MUTANTS, SELECTED, Module, around, mutant, mutants
from .workers import change_join

KNOWLEDGE = ("-k", "test_knowledge")
IGNORED = ("-k", "test_ignored_overflow")
SHARED = ("-k", "test_workers_knowledge")


others = set(MUTANTS)
mutants(
    # A mean of means.
    average_the_losses=lambda m: around(
        m,
        "add_loss",
        lambda original, total, loss, weight, *given: original(
            total, loss / (weight or 1), weight, *given
        ),
    ),
    count_the_loss_of_a_dropped_micro_batch=lambda m: around(
        m,
        "add_loss",
        lambda original, total, loss, weight, adds, *given: original(
            total, loss, weight, True, *given
        ),
    ),
    report_the_scaled_loss=lambda m: around(
        m,
        "window_loss",
        lambda original, total, state, *given: (
            state.loss_scale * original(total, state, *given)
        ),
    ),
    end_a_window_beyond_its_weight=lambda m: around(
        m,
        "ends",
        lambda ends, state, steps, where: ends(
            state._replace(weight=state.weight - isinstance(steps, UntilWeight)),
            steps,
            where,
        ),
    ),
)


@mutant
def divide_the_loss_by_steps(m: Module) -> None:
    def changed(
        original: Any, total: Any, state: State, options: Any, where: Any
    ) -> Any:
        wrong = isinstance(options.steps, int) and state.micro_step < options.steps
        return original(total, state, options, where) * (
            state.micro_step / options.steps if wrong else 1
        )

    around(m, "window_loss", changed)


@mutant
def keep_the_loss_of_a_discarded_window(m: Module) -> None:
    def discard(original: Any, self: Any) -> None:
        kept = self.loss
        original(self)
        self.loss = kept

    around(m.Accumulation, "discard", discard)


@mutant
def count_micro_batches_for_weight(m: Module) -> None:
    def ends(original: Any, state: Any, steps: Any, where: Any) -> Any:
        by_weight = isinstance(steps, UntilWeight)
        return (
            state.micro_step >= m.steps_at(steps, state.optimizer_step, where).weight
            if by_weight
            else original(state, steps, where)
        )

    around(m, "ends", ends)


@mutant
def look_at_an_ignored_overflow(m: Module) -> None:
    def changed(
        original: Any, state: Any, norm: Any, finite: Any, options: Any, *rest: Any
    ) -> Any:
        norm, finite = (
            (norm, finite) if options.on_overflow != "ignore" else (1.0, True)
        )
        return original(state, norm, finite, options, *rest)

    around(m, "decide", changed)


@mutant
def skip_an_ignored_overflow(m: Module) -> None:
    def changed(
        original: Any, self: Any, optimizer: Any, options: Any, workers: Any = None
    ) -> None:
        options = (
            options._replace(on_overflow="skip_window")
            if options.on_overflow == "ignore"
            else options
        )
        original(self, optimizer, options, workers)

    around(m.Accumulation, "__init__", changed)


@mutant
def report_the_loss_of_one_worker(m: Module) -> None:
    def changed(self: Any, join: Any) -> None:
        own = self.loss
        join()
        self.loss = own

    change_join(m, changed)


SELECTED |= dict.fromkeys(MUTANTS.keys() - others, KNOWLEDGE)
SELECTED["report_the_loss_of_one_worker"] = SHARED
SELECTED |= dict.fromkeys(
    ("look_at_an_ignored_overflow", "skip_an_ignored_overflow"), IGNORED
)
