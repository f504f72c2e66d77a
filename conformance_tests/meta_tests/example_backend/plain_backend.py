"""A backend for the framework in plain.py."""

import numpy as np
from plain import Optimizer

from gradaccum import StepResult
from gradaccum.kit import (
    Decision,
    State,
    accumulate,
    at_rest,
    close,
    contribution,
    decide,
    discard,
    ends,
    initial_state,
    joined,
    largest_number,
    optimizer_error,
    require_steps,
    select,
    usable,
)
from gradaccum_conformance.reference.backend import with_numpy_dtype


class Accumulation:
    """An optimizer that runs once per window. The machine decides; this class adds, measures, divides and clears."""

    def __init__(self, optimizer, options, workers=None):
        self.optimizer, self.options, self.workers = optimizer, options, workers
        self.sums = {name: np.zeros(p.shape, self._dtype(p)) for name, p in optimizer.parameters.items()}
        self.machine = at_rest(initial_state(options.scale_rule.init_scale))
        self.grad_norm = 0.0
        self._note()

    def step(self, gradient, weight=1.0):
        factor = contribution(weight, self.options)
        terms = {name: self.sums[name].dtype.type(factor) * g for name, g in gradient.items() if g is not None and weight > 0}
        finite = self.options.on_overflow == "skip_window" or all(np.isfinite(term).all() for term in terms.values())
        if usable(self.machine, weight, finite):
            for name, term in terms.items():
                self.sums[name] += term
        self._move(accumulate(self.machine, weight, finite, select))
        self._note(overflow=not finite)
        if self._ends():
            self.flush()

    def flush(self):
        if self.workers:
            self._join()
        if self.machine.micro_step == 0:
            return self._note()
        norm, finite = measure(self.sums)
        largest = largest_number(float64_weight=self._double())
        decision = Decision(*decide(self.machine, norm, finite, self.options, select, largest))
        if decision.apply:
            parameters = self.optimizer.parameters
            self.optimizer.step({name: (total / decision.divisor).astype(parameters[name].dtype) for name, total in self.sums.items()})
        clear(self.sums)
        self.grad_norm = decision.grad_norm
        self._move(close(self.machine, decision.apply, decision.overflow, self.options, select))
        return self._note(applied=decision.apply, skipped=not decision.apply, overflow=decision.overflow)

    def discard(self):
        clear(self.sums)
        self._move(discard(self.machine))
        self._note()

    def resume(self, fields, options):
        """Go on from a saved state with the fields that `gradaccum.kit.resumed` made of it."""
        self.options = options
        self._move(fields)
        self._note()

    def state(self):
        return self.machine

    def total(self):
        return {name: total.copy() for name, total in self.sums.items()}

    def _join(self):
        """Make this window that of all workers, who all come here: the one exchange of a window."""
        machines, sums = zip(*self.workers.gather((self.machine, self.sums)), strict=True)
        weight, overflow = sum(machine.weight for machine in machines), any(machine.overflow for machine in machines)
        micro_step = max(machine.micro_step for machine in machines)
        self._move(joined(self.machine._replace(micro_step=micro_step), weight, overflow))
        self.sums = {name: sum(own[name] for own in sums) for name in self.sums}

    def _dtype(self, p):
        return np.dtype(self.options.accumulate_dtype or (np.float32 if p.dtype.itemsize == 2 else p.dtype))

    def _ends(self):
        steps, step = self.options.steps, self.machine.optimizer_step
        return ends(self.machine, require_steps(steps(step), step) if callable(steps) else steps, select)

    def _double(self):
        return any(total.dtype == np.float64 for total in self.sums.values())

    def _move(self, fields):
        self.machine = at_rest(State(*fields), float64_weight=self._double())

    def _note(self, applied=False, skipped=False, overflow=False):
        machine = self.machine
        last = (self.grad_norm, machine.loss_scale, machine.micro_step, machine.optimizer_step)
        self.result = StepResult(applied, skipped, overflow, *last)


def measure(sums):
    """Global 2-norm, and whether every element is finite; scaled by the largest element, so that no square overflows."""
    if not all(np.isfinite(total).all() for total in sums.values()):
        return float("inf"), False
    largest = max(float(np.abs(total).max()) for total in sums.values())
    squares = sum(float(np.square(total.astype(np.float64) / (largest or 1.0)).sum()) for total in sums.values())
    return largest * squares**0.5, True


def clear(sums):
    for total in sums.values():
        total[...] = 0


class PlainBackend:
    name = "plain"

    def wrap(self, optimizer, options, *, workers=None):
        if not isinstance(optimizer, Optimizer):
            raise optimizer_error("a plain.Optimizer", optimizer, "Wrap one, once.")
        return Accumulation(optimizer, with_numpy_dtype(options), workers)


backend = PlainBackend()
