"""The distance between the gradients of two partitions of a batch, in units of rounding.

A parameter's unit is the largest change of its gradient when all parameters move by one
rounding, several times, in the large batch and in the first partition. It has a floor:
each micro-batch's gradient is rounded once, and its sum is off by at most log2(terms)
roundings (pairwise summation: Higham, "Accuracy and Stability of Numerical Algorithms",
section 4.2).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from gradaccum.least_squares import solve_coefficients
from gradaccum.options import Reduction
from gradaccum.verification.subject import Conditions, Gradient, Items, Run, Subject

PERTURBATIONS = 4
"""Of the large batch and of the first partition each."""
ROUNDING_LIMIT = 4.0
"""Units that are still rounding: the worst may be twice the worst of the perturbations.
Thirty right models came to 2 at most.
"""
SUM_ROUNDOFF = 2.0**-23
"""float32's: the coarsest dtype in which sums are computed."""

Gradients = Mapping[str, Gradient]
"""By parameter name; a parameter that is left out has a gradient of zero."""


class Partition(NamedTuple):
    """One way to divide a batch into micro-batches."""

    words: str
    parts: tuple[tuple[int, ...], ...]
    """The items of each micro-batch, in order."""


def partitions(items: int, steps: int) -> list[Partition]:
    """Return the partitions to compare with the large batch; the first is that of
    training.

    No micro-batch has one item unless `steps` asks for it, because batch norm refuses a
    single item.
    """
    places = tuple(range(items))
    size = math.ceil(items / steps)
    in_order = cut(places, size)
    steps = len(in_order)
    dealt = tuple(places[start::steps] for start in range(steps))
    long = 2 * size if items >= 3 * size else size
    unequal = (places[:long], *cut(places[long:], size))
    candidates = [
        Partition(f"{steps} micro-batches in order", in_order),
        Partition(f"{steps} micro-batches, items dealt in turn", dealt),
        Partition(f"{steps} micro-batches, the last one first", in_order[::-1]),
        Partition("micro-batches of unequal size", unequal),
        Partition("two halves", cut(places, math.ceil(items / 2))),
        Partition("the large batch, items in reverse order", (places[::-1],)),
    ]
    by_parts: dict[tuple[tuple[int, ...], ...], Partition] = {}
    for partition in candidates:
        by_parts.setdefault(partition.parts, partition)
    return list(by_parts.values())


def cut(items: Items, size: int) -> tuple[tuple[int, ...], ...]:
    return tuple(
        tuple(items[start : start + size]) for start in range(0, len(items), size)
    )


class Weighting(NamedTuple):
    """A way to add up micro-batches."""

    reduction: Reduction
    by_items: bool = False
    """Each micro-batch weighs its number of items, whatever the user's weight."""


class Coefficients(NamedTuple):
    """The sum of the micro-batches that comes nearest to the large batch."""

    best: tuple[float, ...]
    """By micro-batch, what its gradient is to be multiplied by."""
    used: tuple[float, ...]
    """By micro-batch, what accumulation multiplies its gradient by."""
    unexplained: float
    """||g - sum(c_k g_k)|| / sum(||c_k g_k||) with the best coefficients c_k, where g
    is the large batch's gradient: about a rounding where only coefficients are wrong.
    """
    uncertainty: float
    """The error of the best coefficients by rounding, as a part of the largest."""
    error: float
    """The worst parameter's distance from the large batch, in units."""

    @property
    def is_certain(self) -> bool:
        """False: so much is unexplained that the coefficients mean nothing."""
        return self.uncertainty <= COEFFICIENT_ERROR

    @property
    def differ(self) -> bool:
        """True if the best coefficients are not those that are used."""
        largest = max(map(abs, self.best))
        return not self.is_certain or any(
            abs(best - used) > EQUAL * largest
            for best, used in zip(self.best, self.used, strict=True)
        )

    def __str__(self) -> str:
        if not self.is_certain:
            return (
                "No coefficients of the micro-batches give the large batch's gradient:"
                f" the best ones leave {self.unexplained:.2g} of it unexplained."
            )
        pairs = ", ".join(
            f"{best:.3g} ({used:.3g})"
            for best, used in zip(self.best, self.used, strict=True)
        )
        return (
            "Best coefficients of the micro-batches, and in parentheses yours:"
            f" {pairs}. They leave {self.unexplained:.1g} of the gradient unexplained."
        )


EQUAL = 1e-4
"""The relative difference up to which coefficients are shown as equal."""
COEFFICIENT_ERROR = 0.02
"""The uncertainty up to which coefficients mean something: a part of the largest."""


class Comparison:
    """One batch of a subject, under several partitions and conditions."""

    def __init__(self, subject: Subject, steps: int, weighting: Weighting) -> None:
        self.subject = subject
        self.weighting = weighting
        self.items = tuple(range(subject.items))
        self.partitions = partitions(subject.items, steps)
        self._large: dict[Conditions, Run] = {}
        self._units: dict[Conditions, dict[str, float]] = {}

    def large(self, conditions: Conditions) -> Run:
        """Return the run of the large batch."""
        if conditions not in self._large:
            self._large[conditions] = self.subject.window([self.items], conditions)[0]
        return self._large[conditions]

    def factors(
        self, runs: Sequence[Run], parts: Sequence[Items], weighting: Weighting
    ) -> list[float]:
        """Return what accumulation multiplies each micro-batch by, so that the sum is
        the gradient of the large batch.
        """
        if weighting.reduction == "sum":
            return [1.0] * len(runs)
        if weighting.by_items:
            weights = [float(len(part)) for part in parts]
        else:
            weights = [run.weight for run in runs]
        total = math.fsum(weights)
        if total == 0:
            return [0.0] * len(runs)
        if weighting.reduction == "sum_per_item":
            return [self.large(Conditions()).weight / total] * len(runs)
        return [weight / total for weight in weights]

    def accumulate(
        self,
        parts: Sequence[Items],
        conditions: Conditions,
        weighting: Weighting | None = None,
    ) -> dict[str, Gradient]:
        runs = self.subject.window(parts, conditions)
        return linear_combination(
            runs, self.factors(runs, parts, weighting or self.weighting)
        )

    def errors(
        self, conditions: Conditions, weighting: Weighting | None = None
    ) -> dict[str, float]:
        """Return by parameter the worst partition's distance from the large batch, in
        units.
        """
        large = self.large(conditions).gradients
        worst = dict.fromkeys(self.subject.names, 0.0)
        for partition in self.partitions:
            total = self.accumulate(partition.parts, conditions, weighting)
            for name, error in self.distances(total, large, conditions).items():
                worst[name] = max(worst[name], error)
        return worst

    def distances(
        self, a: Gradients, b: Gradients, conditions: Conditions
    ) -> dict[str, float]:
        """Return by parameter the distance of two gradients, in units; inf where one of
        them is not finite.
        """
        return self.distances_in(self.units(conditions), a, b)

    def distances_in(
        self, units: Mapping[str, float], a: Gradients, b: Gradients
    ) -> dict[str, float]:
        in_units = {}
        for name, unit in units.items():
            distance = self.distance(name, a, b)
            if distance == 0:
                in_units[name] = 0.0
            elif unit and math.isfinite(distance):
                in_units[name] = distance / unit
            else:
                in_units[name] = math.inf
        return in_units

    def distance(self, name: str, a: Gradients, b: Gradients) -> float:
        if name in a and name in b:
            return self.norm(a[name] - b[name])
        if name in a or name in b:
            return self.norm(a.get(name, b.get(name)))
        return 0.0

    def norm(self, gradient: Gradient) -> float:
        """Return the 2-norm; inf for NaN."""
        square = self.subject.dot(gradient, gradient)
        return math.inf if math.isnan(square) else math.sqrt(square)

    def is_finite(self, run: Run) -> bool:
        return all(
            math.isfinite(self.norm(gradient)) for gradient in run.gradients.values()
        )

    def units(self, conditions: Conditions) -> dict[str, float]:
        if conditions not in self._units:
            self._units[conditions] = self._measured_units(conditions)
        return self._units[conditions]

    def _measured_units(self, conditions: Conditions) -> dict[str, float]:
        units = self.floors(conditions)
        first = self.partitions[0].parts
        for parts in ((self.items,), first):
            exact = self.accumulate(parts, conditions)
            for number in range(PERTURBATIONS):
                perturbed_conditions = replace(conditions, perturbation=number)
                perturbed_gradients = self.accumulate(parts, perturbed_conditions)
                for name in units:
                    distance = self.distance(name, perturbed_gradients, exact)
                    if math.isfinite(distance):
                        units[name] = max(units[name], distance)
        return units

    def floors(self, conditions: Conditions) -> dict[str, float]:
        """Return each unit's floor: the error of rounding the micro-batches' gradients
        and adding them up, at least the smallest number of the dtype.
        """
        parts = self.partitions[0].parts
        runs = self.subject.window(parts, conditions)
        factors = self.factors(runs, parts, self.weighting)
        floors = {}
        for name in self.subject.names:
            precision = self.subject.precision(name)
            roundings = math.log2(max(precision.terms, 2))
            relative = precision.roundoff + roundings * min(
                precision.roundoff, SUM_ROUNDOFF
            )
            size = 0.0
            for factor, run in zip(factors, runs, strict=True):
                if factor and name in run.gradients:
                    norm = factor * self.norm(run.gradients[name])
                    size += norm if math.isfinite(norm) else 0.0
            absolute = len(runs) * precision.smallest * math.sqrt(precision.elements)
            floors[name] = relative * size + absolute
        return floors

    def coefficients(
        self, parts: Sequence[Items], conditions: Conditions
    ) -> Coefficients | None:
        """Return the coefficients by which the micro-batches come nearest to the large
        batch; None if their gradients do not tell.

        Each parameter counts in its units, so that large gradients do not hide small
        ones. A micro-batch whose gradient is not finite is left out.
        """
        all_runs = self.subject.window(parts, conditions)
        runs = [run if self.is_finite(run) else Run({}, run.weight) for run in all_runs]
        large = self.large(conditions)
        units = self.units(conditions)

        def product(a: Gradients, b: Gradients) -> float:
            return math.fsum(
                self.subject.dot(a[name], b[name]) / units[name] / units[name]
                for name in a.keys() & b.keys()
                if units[name]
            )

        def rest_of(values: Sequence[float]) -> tuple[list[float], float]:
            rest = difference(large.gradients, linear_combination(runs, values))
            products = [product(run.gradients, rest) for run in runs]
            return products, math.sqrt(product(rest, rest))

        gram = [[product(a.gradients, b.gradients) for b in runs] for a in runs]
        elements = sum(
            self.subject.precision(name).elements for name in large.gradients
        )
        try:
            solution = solve_coefficients(gram, rest_of, elements)
        except OverflowError:
            return None
        is_certain = solution.uncertainty <= COEFFICIENT_ERROR
        if not is_certain and not solution.unexplained > COEFFICIENT_ERROR:
            return None
        total = linear_combination(runs, solution.coefficients)
        errors = self.distances(total, large.gradients, conditions)
        return Coefficients(
            solution.coefficients,
            tuple(self.factors(runs, parts, self.weighting)),
            solution.unexplained,
            solution.uncertainty,
            max(errors.values(), default=0.0),
        )


def linear_combination(
    runs: Sequence[Run], factors: Sequence[float]
) -> dict[str, Gradient]:
    """Return the sum of factor x gradient; a factor of 0 leaves its micro-batch out,
    even a NaN.
    """
    total: dict[str, Gradient] = {}
    for run, factor in zip(runs, factors, strict=True):
        if not factor:
            continue
        for name, gradient in run.gradients.items():
            term = gradient * factor
            total[name] = total[name] + term if name in total else term
    return total


def difference(a: Gradients, b: Gradients) -> dict[str, Gradient]:
    return linear_combination([Run(a, 1.0), Run(b, 1.0)], [1.0, -1.0])


def moved_names(errors: Mapping[str, float]) -> tuple[str, ...]:
    """Return the parameters that moved by more than rounding."""
    return tuple(name for name, error in errors.items() if not error <= ROUNDING_LIMIT)
