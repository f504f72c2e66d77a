"""How far the gradients of two partitions of a batch differ, in units of the rounding
error.

A parameter's unit is the largest change of its gradient when all parameters change by
one rounding error. It is measured several times, for the large batch and for the first
partition. The unit has a floor: each micro-batch's gradient is rounded once, and the
sum is off by at most log2(terms) rounding errors (pairwise summation: Higham, "Accuracy
and Stability of Numerical Algorithms", section 4.2). If terms cancel, so that a
gradient consists only of rounding errors, its terms are assumed to be as large as the
largest gradient.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from gradaccum.least_squares import solve_coefficients
from gradaccum.options import Reduction
from gradaccum.verification.subject import Conditions, Gradient, Items, Run, Subject

PERTURBATIONS = 4
"""The number of perturbed runs from which the rounding error is measured, for the large
batch and again for the first partition.
"""
ROUNDING_LIMIT = 4.0
"""A difference of at most this many units counts as rounding, because the largest
difference may be twice the largest perturbation. In thirty models for which
accumulation is right, the difference was at most 2 units.
"""
SUM_ROUNDOFF = 2.0**-23
"""The roundoff of float32, the coarsest dtype in which sums are computed."""
COEFFICIENT_ERROR = 0.02
"""Coefficients are meaningful if their uncertainty, relative to the largest
coefficient, is at most this number.
"""

TRAINING = Conditions()

Gradients = Mapping[str, Gradient]
"""The gradients by parameter name. A parameter that is left out has a gradient of zero.
"""
Parts = tuple[tuple[int, ...], ...]
"""The indices of the items in each micro-batch, in order."""


def partitions(items: int, steps: int) -> dict[Parts, str]:
    """Return the partitions to compare with the large batch, each with its description.
    The first partition is the same as in training.

    No micro-batch has one item unless `steps` asks for it, because batch norm rejects a
    single item.
    """
    places = tuple(range(items))
    size = math.ceil(items / steps)
    in_order = cut(places, size)
    steps = len(in_order)
    long = 2 * size if items >= 3 * size else size
    candidates = {
        f"{steps} micro-batches in order": in_order,
        f"{steps} micro-batches, items dealt in turn": deal(places, steps),
        f"{steps} micro-batches, the last one first": in_order[::-1],
        "micro-batches of unequal size": (places[:long], *cut(places[long:], size)),
        "two halves": cut(places, math.ceil(items / 2)),
        "the large batch, items in reverse order": (places[::-1],),
    }
    by_parts: dict[Parts, str] = {}
    for words, parts in candidates.items():
        by_parts.setdefault(parts, words)
    return by_parts


def cut(items: Items, size: int) -> Parts:
    return tuple(
        tuple(items[start : start + size]) for start in range(0, len(items), size)
    )


def deal(items: Items, steps: int) -> Parts:
    return tuple(tuple(items[start::steps]) for start in range(steps))


@dataclass(frozen=True)
class Coefficients:
    """The weighted sum of the micro-batches' gradients that comes nearest to the large
    batch's gradient.
    """

    best: tuple[float, ...]
    """For each micro-batch, the best factor for its gradient."""
    used: tuple[float, ...]
    """For each micro-batch, the factor with which accumulation multiplies its gradient.
    """
    unexplained: float
    """||g - sum(c_k g_k)|| / sum(||c_k g_k||) with the best coefficients c_k, where g
    is the large batch's gradient. It is about one rounding error if only the
    coefficients are wrong.
    """
    uncertainty: float
    """The rounding error of the best coefficients, relative to the largest coefficient.
    """
    error: float
    """The distance between the sum with the best coefficients and the large batch's
    gradient, for the worst parameter and in units of its rounding error.
    """
    norms: tuple[float, ...]
    """For each micro-batch, the norm of its gradient in units of the rounding error; 0
    if the gradient is not finite.
    """

    def __str__(self) -> str:
        if self.uncertainty > COEFFICIENT_ERROR:
            return (
                "No coefficients of the micro-batches give the large batch's gradient:"
                f" the best coefficients leave {self.unexplained:.2g} of it"
                " unexplained."
            )
        pairs = ", ".join(
            f"{best:.3g} ({used:.3g})"
            for best, used in zip(self.best, self.used, strict=True)
        )
        return (
            "Best coefficients of the micro-batches, with yours in parentheses:"
            f" {pairs}. The best coefficients leave {self.unexplained:.1g} of the"
            " gradient unexplained."
        )


@dataclass(frozen=True)
class Comparison:
    """Compares the gradient of a large batch with the gradients of its partitions,
    under one set of conditions.
    """

    subject: Subject
    partitions: Mapping[Parts, str]
    reduction: Reduction
    conditions: Conditions = TRAINING
    weighs_items: bool = False
    """True if a micro-batch's weight is its number of items, not the user's weight."""

    def weighing_items(self, reduction: Reduction) -> Comparison:
        """Return this comparison with another reduction, and with the number of items
        instead of the user's weights.
        """
        return replace(self, reduction=reduction, weighs_items=True)

    def under(self, **conditions: Any) -> Comparison:
        """Return this comparison with some conditions changed."""
        return replace(self, conditions=replace(self.conditions, **conditions))

    @property
    def items(self) -> tuple[int, ...]:
        return tuple(range(self.subject.items))

    @property
    def first_parts(self) -> Parts:
        """The micro-batches into which training splits the batch."""
        return next(iter(self.partitions))

    def runs(self, parts: Sequence[Items]) -> list[Run]:
        return self.subject.window(parts, self.conditions)

    @cached_property
    def large(self) -> Run:
        """The run of the whole batch as one micro-batch."""
        return self.runs([self.items])[0]

    def factors(self, runs: Sequence[Run], parts: Sequence[Items]) -> list[float]:
        """Return the factor with which accumulation multiplies each micro-batch's
        gradient, so that the sum is the gradient of the large batch.
        """
        weights = [run.weight for run in runs]
        if self.weighs_items:
            weights = [float(len(part)) for part in parts]
        total = math.fsum(weights)
        if self.reduction == "sum":
            return [1.0] * len(runs)
        if total == 0:
            return [0.0] * len(runs)
        if self.reduction == "sum_per_item":
            return [self.large.weight / total] * len(runs)
        return [weight / total for weight in weights]

    def accumulate(self, parts: Sequence[Items]) -> Gradients:
        runs = self.runs(parts)
        factors = self.factors(runs, parts)
        return linear_combination([run.gradients for run in runs], factors)

    @property
    def moved(self) -> tuple[str, ...]:
        """The names of the parameters whose gradient differs from the large batch's
        gradient by more than rounding.
        """
        return moved_names(self.errors)

    @cached_property
    def errors(self) -> dict[str, float]:
        """For each parameter, the largest distance between a partition's gradient and
        the large batch's gradient, in units of the rounding error.
        """
        worst = dict.fromkeys(self.subject.names, 0.0)
        for parts in self.partitions:
            total = self.accumulate(parts)
            for name, error in self.in_units(total, self.large.gradients).items():
                worst[name] = max(worst[name], error)
        return worst

    def differing(self, a: Gradients, b: Gradients) -> tuple[str, ...]:
        """Return the names of the parameters whose gradient differs between `a` and `b`
        by more than rounding.
        """
        return moved_names(self.in_units(a, b))

    def in_units(self, a: Gradients, b: Gradients) -> dict[str, float]:
        return {
            name: distance / self.units[name]
            for name, distance in self.distances(a, b).items()
        }

    def distances(self, a: Gradients, b: Gradients) -> dict[str, float]:
        """Return the 2-norm of the difference between two gradients for each parameter;
        inf if the difference is not finite.
        """
        distances = dict.fromkeys(self.subject.names, 0.0)
        for name, gradient in difference(a, b).items():
            distances[name] = self.norm(gradient)
        return distances

    def norm(self, gradient: Gradient) -> float:
        """Return the 2-norm of a gradient; inf if it is NaN."""
        square = self.subject.dot(gradient, gradient)
        return math.inf if math.isnan(square) else math.sqrt(square)

    def is_finite(self, gradients: Gradients) -> bool:
        return all(math.isfinite(self.norm(each)) for each in gradients.values())

    @cached_property
    def units(self) -> dict[str, float]:
        units = dict(self.floors)
        for parts in ((self.items,), self.first_parts):
            exact = self.accumulate(parts)
            for number in range(PERTURBATIONS):
                perturbed_gradients = self.under(perturbation=number).accumulate(parts)
                distances = self.distances(perturbed_gradients, exact)
                for name, distance in distances.items():
                    if math.isfinite(distance):
                        units[name] = max(units[name], distance)
        return units

    @cached_property
    def floors(self) -> dict[str, float]:
        """For each parameter, the smallest rounding error that is assumed: the error of
        rounding the micro-batches' gradients and adding them up, and at least the
        smallest number of the dtype.
        """
        runs = self.runs(self.first_parts)
        sizes = dict.fromkeys(self.subject.names, 0.0)
        factors = self.factors(runs, self.first_parts)
        for factor, run in zip(factors, runs, strict=True):
            for name, gradient in run.gradients.items():
                size = factor * self.norm(gradient) if factor else 0.0
                sizes[name] += size if math.isfinite(size) else 0.0
        largest = max(sizes.values(), default=0.0)
        floors = {}
        for name, size in sizes.items():
            precision = self.subject.precision(name)
            additions = math.log2(max(precision.terms, 2))
            sum_error = additions * min(precision.roundoff, SUM_ROUNDOFF)
            if size <= sum_error * largest:
                size = largest  # The terms cancel each other.
            absolute = precision.smallest * math.sqrt(max(precision.elements, 1))
            relative = (precision.roundoff + sum_error) * size
            floors[name] = relative + len(runs) * absolute
        return floors

    def coefficients(self, parts: Parts) -> Coefficients | None:
        """Return the coefficients with which the sum of the micro-batches' gradients
        comes nearest to the large batch's gradient; None if the micro-batches'
        gradients are too similar to distinguish.

        Each parameter is measured in units of its own rounding error, so that large
        gradients do not hide small gradients. A micro-batch is left out if its gradient
        is not finite.
        """
        runs = self.runs(parts)
        large = self.large.gradients
        gradients = [
            run.gradients if self.is_finite(run.gradients) else {} for run in runs
        ]

        def product(a: Gradients, b: Gradients) -> float:
            return math.fsum(
                self.subject.dot(a[name], b[name]) / self.units[name] / self.units[name]
                for name in a.keys() & b.keys()
            )

        def rest_of(values: Sequence[float]) -> tuple[list[float], float]:
            rest = difference(large, linear_combination(gradients, values))
            products = [product(each, rest) for each in gradients]
            return products, math.sqrt(product(rest, rest))

        elements = sum(self.subject.precision(name).elements for name in large)
        try:
            gram = [[product(a, b) for b in gradients] for a in gradients]
            solution = solve_coefficients(gram, rest_of, elements)
        except OverflowError:
            return None
        is_uncertain = solution.uncertainty > COEFFICIENT_ERROR
        if is_uncertain and not solution.unexplained > COEFFICIENT_ERROR:
            return None
        total = linear_combination(gradients, solution.coefficients)
        return Coefficients(
            best=solution.coefficients,
            used=tuple(self.factors(runs, parts)),
            unexplained=solution.unexplained,
            uncertainty=solution.uncertainty,
            error=max(self.in_units(total, large).values(), default=0.0),
            norms=solution.norms,
        )


def linear_combination(
    gradients: Iterable[Gradients], factors: Iterable[float]
) -> dict[str, Gradient]:
    """Return the sum of the micro-batches' gradients, each multiplied by its factor. A
    micro-batch with a factor of 0 is left out, even if its gradient is NaN.
    """
    total: dict[str, Gradient] = {}
    for each, factor in zip(gradients, factors, strict=True):
        if factor:
            for name, gradient in each.items():
                term = gradient * factor
                total[name] = total[name] + term if name in total else term
    return total


def difference(a: Gradients, b: Gradients) -> dict[str, Gradient]:
    return linear_combination([a, b], [1.0, -1.0])


def moved_names(errors: Mapping[str, float]) -> tuple[str, ...]:
    """Return the names of the parameters whose error is larger than rounding."""
    return tuple(name for name, error in errors.items() if not error <= ROUNDING_LIMIT)
