"""Measure how much the gradient of a batch changes if the batch is split into
micro-batches.

A *partition* is a way to split the batch. The accumulated gradient of each partition is
compared with the gradient of the *large batch*, which is the whole batch as a single
micro-batch. The differences are measured in units of the rounding error.

Each parameter has its own unit: the amount by which rounding can change the parameter's
gradient. To measure the unit, the parameters are perturbed by one rounding error. This
is done several times, both with the large batch and with the first partition, which is
the partition that training uses. The unit is the largest change of the parameter's
gradient.

The unit also has a lower bound, because a perturbation may leave a gradient unchanged.
The bound is an estimate: each micro-batch's gradient has one rounding error, plus
log2(n) rounding errors because each of its elements is a sum of n terms (pairwise
summation: Higham, "Accuracy and Stability of Numerical Algorithms", section 4.2). If
the terms cancel, so that a gradient consists only of rounding errors, the terms are
assumed to be as large as the largest gradient of any parameter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple

from gradaccum.least_squares import GradientBasis, Vector, norm_of, right_factors
from gradaccum.options import Reduction
from gradaccum.verification.batch import Items
from gradaccum.verification.subject import Conditions, Subject

PERTURBATIONS = 4
"""The number of random perturbations of the parameters with which the rounding error is
measured. With each perturbation, the gradient is computed twice: for the large batch
(the whole batch as a single micro-batch), and for the partition into micro-batches that
training uses.
"""
ROUNDING_LIMIT = 4.0
"""Two gradients count as equal if they differ by at most this many units of the
rounding error (see `Comparison.units`). The limit is above 1, because rounding may
change both gradients by one unit in opposite directions. In thirty models for which
accumulation is correct, the difference was at most 2 units.
"""
SUM_ROUNDOFF = 2.0**-23
"""The roundoff of float32, the coarsest dtype in which sums are computed."""
FIT_ERROR = 0.02
"""The coefficients in `Coefficients.best` are meaningful if their `uncertainty` is at
most this number.
"""

TRAINING = Conditions()

Parts = tuple[tuple[int, ...], ...]
"""The indices of the items in each micro-batch, in order."""


def partitions(items: int, steps: int) -> tuple[Parts, ...]:
    """Return the partitions (ways to split the batch into micro-batches) whose
    gradients are compared with the gradient of the whole batch. The first partition is
    the partition that training uses.

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
    """The result of fitting a weighted sum of the micro-batches' gradients to the large
    batch's gradient. `best` contains the fitted coefficients, and `used` contains the
    coefficients that accumulation uses. `unexplained`, `uncertainty` and `error`
    describe how well the weighted sum with the fitted coefficients agrees with the
    large batch's gradient.
    """

    best: tuple[float, ...]
    """For each micro-batch, the best coefficient of its gradient. The best coefficients
    minimize the 2-norm of the difference between the large batch's gradient and the sum
    of the micro-batches' gradients, each multiplied by its coefficient. In the norm,
    each parameter is measured in units of its own rounding error.
    """
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
    """The estimated error of the coefficients in `best`, relative to the largest
    coefficient. The estimate is proportional to the norm of the residual, which is the
    large batch's gradient minus the sum of the micro-batches' gradients, each
    multiplied by its best coefficient.
    """
    error: float
    """How far the sum with the coefficients in `best` is from the large batch's
    gradient. For each parameter, the 2-norm of the difference is measured in units of
    the parameter's rounding error. This field is the largest of these numbers.
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
    """Compares the gradient of the large batch (the whole batch as a single
    micro-batch) with the accumulated gradient of each partition (way to split the
    batch), under one set of conditions.
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
        """Return the accumulated gradient of `parts`. A micro-batch with a factor of 0
        is left out, even if its gradient is NaN.
        """
        factors = (weighting or self.weighting).factors(parts)
        pairs = zip(self.gradients(parts), factors, strict=True)
        return sum(gradient * factor for gradient, factor in pairs if factor)

    @cached_property
    def errors(self) -> dict[str, float]:
        """For each parameter, the largest distance between the accumulated gradient of
        any partition and the large batch's gradient. The distance is the 2-norm of the
        difference, in units of the rounding error (see `units`).
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
        """True if accumulation would be correct with `weighting` instead of this
        comparison's own weighting: the accumulated gradient of every partition would
        equal the large batch's gradient, up to rounding.
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
        """For each parameter, the 2-norm of the change that rounding can cause in the
        parameter's gradient. This is the largest change that was measured when all
        parameters were perturbed by one rounding error, but at least the parameter's
        entry in `floors`.
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
        """For each parameter, the lower bound of its entry in `units`. The bound is
        needed because a perturbation may leave a gradient unchanged, so that the
        measured change is 0.

        The bound is an estimate of the rounding error that arises when the
        micro-batches' gradients are computed and added up. It is above 0 even if all
        gradients are 0.
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
            absolute /= self.conditions.scale
            floors[name] = (roundoff + sum_error) * size + len(parts) * absolute
        return floors

    def coefficients(self, parts: Parts) -> Coefficients | None:
        """Fit a weighted sum of the micro-batches' gradients to the large batch's
        gradient, and return its coefficients. Return None if the micro-batches'
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
    """Return the names of the parameters whose error is above `ROUNDING_LIMIT`, which
    means that rounding alone did not cause the error. `errors` contains each
    parameter's error in units of its rounding error.
    """
    return tuple(name for name, error in errors.items() if not error <= ROUNDING_LIMIT)
