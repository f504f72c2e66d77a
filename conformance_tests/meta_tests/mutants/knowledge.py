"""Faults in what a window knows besides its gradient: its loss, its noise, its end by
weight, and that it need not look at its gradient.
"""

from __future__ import annotations

from typing import Any

from gradaccum.kit import State, UntilWeight

from .planting import MUTANTS, SELECTED, Module, around, mutant, mutants, put
from .workers import change_join

KNOWLEDGE = ("-k", "test_knowledge")
IGNORED = ("-k", "test_ignored_overflow")
SHARED = ("-k", "test_workers_knowledge")


def change_first_state(m: Module, **fields: float) -> None:
    """Let the first micro-batch's norm be divided by what another state says."""
    around(
        m,
        "first_seen",
        lambda original, noise, state, *given: original(
            noise, state._replace(**fields), *given
        ),
    )


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
    forget_the_weight_of_the_first_micro_batch=lambda m: change_first_state(
        m, weight=1.0
    ),
    measure_the_noise_of_scaled_gradients=lambda m: change_first_state(
        m, loss_scale=1.0
    ),
    keep_the_first_micro_batch_of_a_discarded_window=lambda m: put(
        m, forget_window=lambda noise: noise
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
    count_one_worker_s_first_micro_batch=lambda m: around(
        m, "window_seen", lambda original, *given: original(*given[:-1], 1)
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
def take_each_micro_batch_for_the_first(m: Module) -> None:
    m.is_first = lambda noise, state: state.weight > 0
    around(
        m,
        "first_seen",
        lambda original, noise, *given: original(
            noise._replace(first_weight=0.0), *given
        ),
    )


@mutant
def average_the_ratios(m: Module) -> None:
    """The quotient of two running means is not the running mean of quotients."""

    def changed(
        original: Any, noise: Any, state: Any, norm: Any, options: Any, *given: Any
    ) -> Any:
        fresh = m.Noise(
            *original(
                noise._replace(trace=0.0, square=0.0),
                state,
                norm,
                options._replace(noise_decay=0.0),
                *given,
            )
        )
        if not fresh.square:
            return noise._replace(first_weight=0.0, first_square=0.0)
        decay = options.noise_decay or 0.0
        return fresh._replace(
            trace=decay * noise.trace + (1 - decay) * fresh.trace / fresh.square,
            square=1.0,
        )

    around(m, "window_seen", changed)


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
SELECTED |= dict.fromkeys(
    ("report_the_loss_of_one_worker", "count_one_worker_s_first_micro_batch"), SHARED
)
SELECTED |= dict.fromkeys(
    ("look_at_an_ignored_overflow", "skip_an_ignored_overflow"), IGNORED
)
