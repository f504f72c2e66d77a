"""A backend for the framework in plain.py."""

import math

import numpy as np
from plain import Optimizer

from gradaccum import StepResult
from gradaccum.kit import (
    Decision,
    State,
    UntilWeight,
    accumulate,
    add_loss,
    at_rest,
    close,
    contribution,
    decide,
    discard,
    ends,
    given_weight,
    half_made_error,
    initial_state,
    is_known,
    joined,
    largest_number,
    measures,
    optimizer_error,
    require_denominator,
    require_steps,
    select,
    shared_until_weight_error,
    steps_at,
    usable,
    use_of_weights,
    window_loss,
    with_denominator,
)
from gradaccum_conformance.reference.backend import with_numpy_dtype


class Accumulation:
    """An optimizer that runs once per window: it adds, measures, divides and clears."""

    def __init__(self, optimizer, options, workers=None):
        self.optimizer = optimizer
        self.options = options
        self.workers = workers
        self.sums = {
            name: np.zeros(p.shape, self._dtype(p))
            for name, p in optimizer.parameters.items()
        }
        self.machine = at_rest(initial_state(options.scale_rule.init_scale))
        self.grad_norm = 0.0
        self.loss = 0.0
        self.window_loss = math.nan
        self.half_made = False
        self._note()

    def step(self, gradient, weight=None, loss=math.nan):
        self._require_whole()
        steps = self._steps()
        weight = given_weight(weight, use_of_weights(self.options))
        factor = contribution(weight, self.options)
        terms = {
            name: self.sums[name].dtype.type(factor) * g
            for name, g in gradient.items()
            if g is not None and weight > 0
        }
        finite = self.options.on_overflow != "drop_micro_batch" or all(
            np.isfinite(term).all() for term in terms.values()
        )
        adds = usable(self.machine, weight, finite)
        self.half_made = True  # until `_move`, because any call may raise an error
        if adds:
            for name, term in terms.items():
                self.sums[name] += term
        self.loss = add_loss(self.loss, loss, weight, adds, self.options, select)
        self._move(accumulate(self.machine, weight, finite, select))
        self._note(overflow=not finite)
        if ends(self.machine, steps, select):
            self.flush()

    def flush(self, denominator=None):
        self._require_whole()
        if denominator is not None:
            denominator = require_denominator(denominator, self.options)
        if self.workers:
            self._join()
        if self.machine.micro_step == 0:
            return self._note()
        machine = self.machine
        options = self.options
        if denominator is not None:
            machine, options = with_denominator(machine, denominator, options, select)
        measured = measures(self.options)
        norm, finite = measure(self.sums) if measured else (math.nan, True)
        largest = largest_number(float64_weight=self._double())
        decision = Decision(*decide(machine, norm, finite, options, select, largest))
        self.half_made = True
        if decision.apply:
            gradient = {
                name: (self.sums[name] / decision.divisor).astype(p.dtype)
                for name, p in self.optimizer.parameters.items()
            }
            self.optimizer.step(gradient)
        clear(self.sums)
        self.grad_norm = decision.grad_norm
        self.window_loss = window_loss(self.loss, machine, options, select)
        self.loss = 0.0
        applied = decision.apply
        overflow = decision.overflow
        self._move(close(self.machine, applied, overflow, self.options, select))
        return self._note(applied, not applied, overflow)

    def discard(self):
        clear(self.sums)
        self.loss = 0.0
        self._move(discard(self.machine))
        self._note()

    def resume(self, fields, options):
        """Resume from the fields that `gradaccum.kit.resumed` returns."""
        self.options = options
        self._move(fields)
        self._note()

    def state(self):
        return self.machine

    def total(self):
        return {name: total.copy() for name, total in self.sums.items()}

    def _join(self):
        """Merge the open windows of all workers into one window."""
        machines, sums, losses = zip(
            *self.workers.gather((self.machine, self.sums, self.loss)), strict=True
        )
        weight = sum(machine.weight for machine in machines)
        overflow = any(machine.overflow for machine in machines)
        longest = max(machine.micro_step for machine in machines)
        machine = self.machine._replace(micro_step=longest)
        self._move(joined(machine, weight, overflow))
        self.sums = {name: sum(own[name] for own in sums) for name in self.sums}
        self.loss = sum(losses)

    def _dtype(self, p):
        own = np.float32 if p.dtype.itemsize == 2 else p.dtype
        return np.dtype(self.options.accumulate_dtype or own)

    def _steps(self):
        steps = self.options.steps
        step = self.machine.optimizer_step
        if is_known(steps):
            return steps
        return require_steps(steps_at(steps, step, select), step, steps)

    def _double(self):
        return any(total.dtype == np.float64 for total in self.sums.values())

    def _move(self, fields):
        self.machine = at_rest(State(*fields), float64_weight=self._double())
        self.half_made = False

    def _require_whole(self):
        if self.half_made:
            raise half_made_error()

    def _note(self, applied=False, skipped=False, overflow=False):
        machine = self.machine
        counted = (machine.loss_scale, machine.micro_step, machine.optimizer_step)
        last = self.grad_norm, *counted, self.window_loss
        self.result = StepResult(applied, skipped, overflow, *last)


def measure(sums):
    """Return the global 2-norm, and True if every element is finite. Large elements
    whose squares would overflow do not make the norm infinite.
    """
    if not all(np.isfinite(total).all() for total in sums.values()):
        return float("inf"), False
    largest = max(float(np.abs(total).max()) for total in sums.values())
    squares = sum(
        float(np.square(total.astype(np.float64) / (largest or 1.0)).sum())
        for total in sums.values()
    )
    return largest * squares**0.5, True


def clear(sums):
    for total in sums.values():
        total[...] = 0


class PlainBackend:
    name = "plain"

    def wrap(self, optimizer, options, *, workers=None):
        if not isinstance(optimizer, Optimizer):
            raise optimizer_error("a plain.Optimizer", optimizer, "Wrap it once.")
        if workers and isinstance(options.steps, UntilWeight):
            raise shared_until_weight_error(options.steps)
        return Accumulation(optimizer, with_numpy_dtype(options), workers)


backend = PlainBackend()
