"""Measure how much the gradient of a batch depends on how the batch is split, in units
of the rounding error.

Each parameter has its own unit. To measure the unit, all parameters are perturbed by
one rounding error, and the change in the parameter's gradient is computed. The unit is
the largest change in several such runs, both of the large batch and of the first
partition.

The unit also has a lower bound, because a perturbation may leave a gradient unchanged.
The bound is an estimate of the rounding error: one rounding error for each
micro-batch's gradient, and log2(terms) rounding errors for adding up its terms
(pairwise summation: Higham, "Accuracy and Stability of Numerical Algorithms", section
4.2). If terms cancel, so that a gradient consists only of rounding errors, its terms
are assumed to be as large as the largest gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple

from gradaccum.least_squares import (
    GradientBasis,
    Vector,
    norm_of,
    right_factors,
)
from gradaccum.options import Reduction
from gradaccum.verification.batch import Items
from gradaccum.verification.subject import Conditions, Subject

PERTURBATIONS = 4
"""The number of runs with perturbed parameters that measure the rounding error. The
large batch is run this many times, and so is the first partition.
"""
ROUNDING_LIMIT = 4.0
"""A difference of at most this many units counts as rounding. The limit is above 1,
because two gradients may differ by twice the largest change that a perturbation caused.
In thirty models for which accumulation is correct, the difference was at most 2 units.
"""
SUM_ROUNDOFF = 2.0**-23
"""The roundoff of float32, the coarsest dtype in which sums are computed."""
FIT_ERROR = 0.02
"""Coefficients are meaningful if their uncertainty, relative to the largest
coefficient, is at most this number.
"""

TRAINING = Conditions()

Parts = tuple[tuple[int, ...], ...]
"""The indices of the items in each micro-batch, in order."""


def partitions(items: int, steps: int) -> tuple[Parts, ...]:
    """Return the partitions to compare with the large batch. The first partition is the
    same as in training.

    Micro-batches of one item are avoided unless `steps` requires them, because batch
    norm rejects a single item.
    """
    places = tuple(range(items))
    size = math.ceil(items / steps)
    in_order = cut(places, size)
    steps = len(in_order)
    long = 2 * size if items >= 3 * size else size
    candidates = [
        in_order,
        tuple(places[start::steps] for start in range(steps)),
        in_order[::-1],
        (places[:long], *cut(places[long:], size)),
        cut(places, math.ceil(items / 2)),
        (places[::-1],),
    ]
    return tuple(dict.fromkeys(candidates))


def cut(items: tuple[int, ...], size: int) -> Parts:
    return tuple(items[start : start + size] for start in range(0, len(items), size))


class Coefficients(NamedTuple):
    """The weighted sum of the micro-batches' gradients that comes nearest to the large
    batch's gradient. The factors in this sum are the best coefficients.
    """

    best: tuple[float, ...]
    """For each micro-batch, the best coefficient of its gradient."""
    used: tuple[float, ...]
    """For each micro-batch, the factor by which accumulation multiplies its gradient.
    """
    unexplained: float
    """The fraction of the large batch's gradient g that the sum with the best
    coefficients c_k does not explain: ||g - sum(c_k g_k)|| / sum(||c_k g_k||). Here g_k
    is the gradient of micro-batch k. If only the coefficients are wrong, this fraction
    is about one rounding error.
    """
    uncertainty: float
    """The rounding error of the best coefficients, relative to the largest coefficient.
    """
    error: float
    """The distance between the sum with the best coefficients and the large batch's
    gradient. The distance is computed for each parameter separately, in units of the
    parameter's rounding error. This field is the largest of these distances.
    """
    norms: tuple[float, ...]
    """For each micro-batch, the norm of its gradient in units of the rounding error; 0
    if the gradient is not finite.
    """

    def __str__(self) -> str:
        if self.uncertainty > FIT_ERROR:
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


class Weighting(NamedTuple):
    """The reduction and the weights of the micro-batches. They determine the factor by
    which each micro-batch's gradient is multiplied before the gradients are added up.
    """

    reduction: Reduction
    weigh: Callable[[Items], float]
    """Returns the weight of a micro-batch."""

    def factors(self, parts: Sequence[Items]) -> tuple[float, ...]:
        """Return one factor per micro-batch. The sum of the micro-batches' gradients,
        each multiplied by its factor, should equal the gradient of the large batch's
        loss.
        """
        weights = [self.weigh(part) for part in parts]
        large_weight = self.weigh(sorted(chain(*parts)))
        return right_factors(self.reduction, weights, large_weight)


@dataclass(frozen=True)
class Comparison:
    """Compares the gradient of a large batch with the gradients of its partitions,
    under one set of conditions.
    """

    subject: Subject
    partitions: tuple[Parts, ...]
    weighting: Weighting
    conditions: Conditions = TRAINING

    def under(self, **conditions: Any) -> Comparison:
        """Return a copy of this comparison with some conditions changed."""
        return replace(self, conditions=replace(self.conditions, **conditions))

    @property
    def items(self) -> tuple[int, ...]:
        return tuple(range(self.subject.batch.items))

    def gradients(self, parts: Sequence[Items]) -> list[Vector]:
        return self.subject.gradients(parts, self.conditions)

    @cached_property
    def large(self) -> Vector:
        """The gradient of the whole batch, computed as one micro-batch."""
        return self.gradients([self.items])[0]

    def accumulate(
        self, parts: Sequence[Items], weighting: Weighting | None = None
    ) -> Vector:
        """Return the accumulated gradient. A micro-batch with a factor of 0 is left
        out, even if its gradient is NaN.
        """
        factors = (weighting or self.weighting).factors(parts)
        pairs = zip(self.gradients(parts), factors, strict=True)
        return sum(gradient * factor for gradient, factor in pairs if factor)

    @cached_property
    def errors(self) -> dict[str, float]:
        """For each parameter, the largest distance between a partition's gradient and
        the large batch's gradient, in units of the rounding error.
        """
        worst = dict.fromkeys(self.subject.places, 0.0)
        for parts in self.partitions:
            difference = self.accumulate(parts) - self.large
            for name, error in self.in_units(difference).items():
                worst[name] = max(worst[name], error)
        return worst

    @property
    def moved(self) -> tuple[str, ...]:
        """The names of the parameters whose gradient differs from the large batch's
        gradient by more than rounding.
        """
        return moved_names(self.errors)

    def is_right_with(self, weighting: Weighting) -> bool:
        """True if accumulation would be correct with another weighting: every partition
        would then give the large batch's gradient, up to rounding.
        """
        return not any(
            self.differing(self.accumulate(parts, weighting), self.large)
            for parts in self.partitions
        )

    def differing(self, a: Vector, b: Vector) -> tuple[str, ...]:
        """Return the names of the parameters whose gradient differs between `a` and `b`
        by more than rounding.
        """
        return moved_names(self.in_units(a - b))

    def in_units(self, gradient: Vector) -> dict[str, float]:
        """For each parameter, return the 2-norm of its part of `gradient`, in units of
        the rounding error.
        """
        return self.norms(self.divided_by_units(gradient))

    def norms(self, gradient: Vector) -> dict[str, float]:
        """For each parameter, return the 2-norm of its part of `gradient`, or inf if
        the norm is NaN.
        """
        norms = {}
        for name, place in self.subject.places.items():
            norm = norm_of(gradient[place])
            norms[name] = math.inf if math.isnan(norm) else norm
        return norms

    @cached_property
    def units(self) -> dict[str, float]:
        """For each parameter, the unit in which differences of its gradient are
        measured (see the module's docstring).
        """
        units = dict(self.floors)
        for parts in ((self.items,), self.partitions[0]):
            exact = self.accumulate(parts)
            for number in range(PERTURBATIONS):
                perturbed_gradient = self.under(perturbation=number).accumulate(parts)
                for name, change in self.norms(perturbed_gradient - exact).items():
                    if math.isfinite(change):
                        units[name] = max(units[name], change)
        return units

    @cached_property
    def floors(self) -> dict[str, float]:
        """For each parameter, a lower bound on its entry in `units`: the estimated
        rounding error of computing the micro-batches' gradients and adding them up. The
        bound is above 0 even if all gradients are 0.
        """
        parts = self.partitions[0]
        sizes = dict.fromkeys(self.subject.places, 0.0)
        factors = self.weighting.factors(parts)
        for gradient, factor in zip(self.gradients(parts), factors, strict=True):
            for name, norm in self.norms(gradient).items():
                if math.isfinite(norm):
                    sizes[name] += factor * norm
        largest = max(sizes.values())
        roundoff, smallest = self.subject.precision
        additions = math.log2(max(self.subject.batch.terms, 2))
        sum_error = additions * min(roundoff, SUM_ROUNDOFF)
        floors = {}
        for name, place in self.subject.places.items():
            size = sizes[name]
            if size <= sum_error * largest:
                size = largest  # The terms cancel each other.
            absolute = smallest * math.sqrt(place.stop - place.start)
            floors[name] = (roundoff + sum_error) * size + len(parts) * absolute
        return floors

    def coefficients(self, parts: Parts) -> Coefficients | None:
        """Return the coefficients with which the sum of the micro-batches' gradients
        comes nearest to the large batch's gradient; None if the micro-batches'
        gradients are too similar to distinguish.

        Each parameter is measured in units of its own rounding error, so that large
        gradients do not hide small gradients. A micro-batch is left out if its gradient
        is not finite.
        """
        gradients = [
            self.divided_by_units(gradient if is_finite(gradient) else self.large * 0.0)
            for gradient in self.gradients(parts)
        ]
        basis = GradientBasis(gradients)
        large = self.divided_by_units(self.large)
        fit = basis.weighted_sum(large)
        if fit.uncertainty > FIT_ERROR and not fit.unexplained > FIT_ERROR:
            return None
        _, remainder = basis.project(large)
        return Coefficients(
            fit.coefficients,
            self.weighting.factors(parts),
            fit.unexplained,
            fit.uncertainty,
            max(self.norms(remainder).values()),
            fit.norms,
        )

    def divided_by_units(self, gradient: Vector) -> Vector:
        divided = gradient * 1.0
        for name, place in self.subject.places.items():
            divided[place] /= self.units[name]
        return divided


def is_finite(gradient: Vector) -> bool:
    return math.isfinite(norm_of(gradient))


def moved_names(errors: Mapping[str, float]) -> tuple[str, ...]:
    """Return the names of the parameters whose error is above `ROUNDING_LIMIT`, because
    rounding does not cause such an error. `errors` contains each parameter's error in
    units of the rounding error.
    """
    return tuple(name for name, error in errors.items() if not error <= ROUNDING_LIMIT)
