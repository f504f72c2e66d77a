"""Faults in what a window knows besides its gradient: its loss, its noise, its end by weight, and that it need not look at its gradient."""

from __future__ import annotations

from typing import Any

from gradaccum.kit import State, UntilWeight

from .planting import MUTANTS, SELECTED, Module, mutant
from .workers import change_join

KNOWLEDGE = ("-k", "test_knowledge")
IGNORED = ("-k", "test_ignored_overflow")
SHARED = ("-k", "test_workers_knowledge")


def change_first_state(m: Module, **fields: float) -> None:
    """Let the first micro-batch's norm be divided by what another state says."""
    original = m.first_seen
    m.first_seen = lambda noise, state, norm, where: original(noise, state._replace(**fields), norm, where)


@mutant
def average_the_losses(m: Module) -> None:
    """A mean of means."""
    original = m.add_loss
    m.add_loss = lambda total, loss, weight, adds, options, where: original(total, loss / (weight or 1), weight, adds, options, where)


@mutant
def count_the_loss_of_a_dropped_micro_batch(m: Module) -> None:
    original = m.add_loss
    m.add_loss = lambda total, loss, weight, adds, options, where: original(total, loss, weight, True, options, where)


@mutant
def report_the_scaled_loss(m: Module) -> None:
    original = m.window_loss
    m.window_loss = lambda total, state, options, where: state.loss_scale * original(total, state, options, where)


@mutant
def divide_the_loss_by_steps(m: Module) -> None:
    original = m.window_loss

    def changed(total: Any, state: State, options: Any, where: Any) -> Any:
        wrong = isinstance(options.steps, int) and state.micro_step < options.steps
        return original(total, state, options, where) * (state.micro_step / options.steps if wrong else 1)

    m.window_loss = changed


@mutant
def keep_the_loss_of_a_discarded_window(m: Module) -> None:
    original = m.Accumulation.discard

    def discard(self: Any) -> None:
        kept = self.loss
        original(self)
        self.loss = kept

    m.Accumulation.discard = discard


@mutant
def forget_the_weight_of_the_first_micro_batch(m: Module) -> None:
    change_first_state(m, weight=1.0)


@mutant
def take_each_micro_batch_for_the_first(m: Module) -> None:
    m.is_first = lambda noise, state: state.weight > 0
    original = m.first_seen
    m.first_seen = lambda noise, state, norm, where: original(noise._replace(first_weight=0.0), state, norm, where)


@mutant
def measure_the_noise_of_scaled_gradients(m: Module) -> None:
    change_first_state(m, loss_scale=1.0)


@mutant
def keep_the_first_micro_batch_of_a_discarded_window(m: Module) -> None:
    m.forget_window = lambda noise: noise


@mutant
def average_the_ratios(m: Module) -> None:
    """The quotient of two running means is not the running mean of quotients."""
    original = m.window_seen

    def changed(noise: Any, state: Any, norm: Any, options: Any, where: Any, workers: Any = 1) -> Any:
        fresh = m.Noise(*original(noise._replace(trace=0.0, square=0.0), state, norm, options._replace(noise_decay=0.0), where, workers))
        if not fresh.square:
            return noise._replace(first_weight=0.0, first_square=0.0)
        decay = options.noise_decay or 0.0
        return fresh._replace(trace=decay * noise.trace + (1 - decay) * fresh.trace / fresh.square, square=1.0)

    m.window_seen = changed


@mutant
def count_micro_batches_for_weight(m: Module) -> None:
    original = m.ends
    m.ends = lambda state, steps, where: (
        state.micro_step >= m.steps_at(steps, state.optimizer_step, where).weight
        if isinstance(steps, UntilWeight)
        else original(state, steps, where)
    )


@mutant
def end_a_window_beyond_its_weight(m: Module) -> None:
    original = m.ends
    m.ends = lambda state, steps, where: original(state._replace(weight=state.weight - isinstance(steps, UntilWeight)), steps, where)


@mutant
def look_at_an_ignored_overflow(m: Module) -> None:
    original = m.decide

    def changed(state: Any, norm: Any, finite: Any, options: Any, *rest: Any) -> Any:
        norm, finite = (norm, finite) if options.on_overflow != "ignore" else (1.0, True)
        return original(state, norm, finite, options, *rest)

    m.decide = changed


@mutant
def skip_an_ignored_overflow(m: Module) -> None:
    original = m.Accumulation.__init__

    def changed(self: Any, optimizer: Any, options: Any, workers: Any = None) -> None:
        options = options._replace(on_overflow="skip_window") if options.on_overflow == "ignore" else options
        original(self, optimizer, options, workers)

    m.Accumulation.__init__ = changed


@mutant
def report_the_loss_of_one_worker(m: Module) -> None:
    def changed(self: Any, join: Any) -> None:
        own = self.loss
        join()
        self.loss = own

    change_join(m, changed)


@mutant
def count_one_worker_s_first_micro_batch(m: Module) -> None:
    original = m.window_seen
    m.window_seen = lambda noise, state, norm, options, where, workers: original(noise, state, norm, options, where, 1)


for name, plant in list(globals().items()):
    if MUTANTS.get(name) is plant:
        SELECTED[name] = KNOWLEDGE
SELECTED |= dict.fromkeys(("report_the_loss_of_one_worker", "count_one_worker_s_first_micro_batch"), SHARED)
SELECTED |= dict.fromkeys(("look_at_an_ignored_overflow", "skip_an_ignored_overflow"), IGNORED)
