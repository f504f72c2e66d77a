"""The distance of a gradient from one partition of a batch to another, in units of
rounding.

A parameter's unit is the largest change of its gradient when all floating-point inputs
and parameters are perturbed by one rounding, several times, for the large batch and for
the first partition. Its floor: each micro-batch's gradient is rounded once, and its sum
is off by at most log2(terms) roundings (pairwise summation: Higham, "Accuracy and
Stability of Numerical Algorithms", section 4.2).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from gradaccum.loop_check import solve_coefficients
from gradaccum.options import Reduction
from gradaccum.splitting import size_for
from gradaccum.verification.subject import Conditions, Gradient, Items, Run, Subject


class Partition(NamedTuple):
    """One way to divide a batch into micro-batches."""

    words: str
    parts: tuple[tuple[int, ...], ...]
    """The items of each micro-batch, in order."""


def partitions(items: Sequence[int], steps: int) -> list[Partition]:
    """Return the partitions to compare with the large batch; the first, of `steps`
    micro-batches, is training's.

    No micro-batch has one item unless `steps` asks for it: a batch norm refuses a
    single item.
    """
    size = size_for(len(items), steps)
    steps = -(-len(items) // size)
    long = 2 * size if len(items) >= 3 * size else size
    made = [
        Partition(f"{steps} micro-batches in order", cut(items, size)),
        Partition(
            f"{steps} micro-batches, items dealt in turn",
            tuple(tuple(items[start::steps]) for start in range(steps)),
        ),
        Partition(f"{steps} micro-batches, the last one first", cut(items, size)[::-1]),
        Partition(
            "micro-batches of unequal size",
            (tuple(items[:long]), *cut(items[long:], size)),
        ),
        Partition("two halves", cut(items, -(-len(items) // 2))),
        Partition("the large batch, items in reverse order", (tuple(items[::-1]),)),
    ]
    return [
        partition
        for place, partition in enumerate(made)
        if partition.parts not in [other.parts for other in made[:place]]
    ]


def cut(items: Sequence[int], size: int) -> tuple[tuple[int, ...], ...]:
    """Cut `items` into micro-batches of `size`; the last one may be smaller."""
    return tuple(
        tuple(items[start : start + size]) for start in range(0, len(items), size)
    )


def item_axis(
    large: Sequence[int], small: Sequence[int], items: int, part: int
) -> int | None:
    """Return the axis with one row, or equally many, per item; None if there is none,
    or several.

    The shapes in the `large` batch of `items` and in a `small` one of `part` items show
    it.
    """
    if len(large) != len(small):
        return None
    differing = [
        axis for axis, (a, b) in enumerate(zip(large, small, strict=True)) if a != b
    ]
    if len(differing) != 1:
        return None
    a = large[differing[0]]
    b = small[differing[0]]
    return differing[0] if a % items == 0 and b == a // items * part else None


PERTURBATIONS = 4
"""Of the large batch and of the first partition each."""
ROUNDING_LIMIT = 4.0
"""Units that are still rounding: the worst may be twice the worst of the perturbations.
Thirty sound models came to 2 at most.
"""
SUM_ROUNDOFF = 2.0**-23
"""float32's: the coarsest dtype in which sums are kept."""

Gradients = Mapping[str, Gradient]
"""By parameter name; one that is left out is zero."""


class Way(NamedTuple):
    """A way to add up micro-batches."""

    reduction: Reduction
    values: Sequence[float] | None = None
    """A weight per item; None: the weight that the subject gives."""

    def weight(self, part: Items, run: Run) -> float:
        if self.values is None:
            return run.weight
        return math.fsum(self.values[item] for item in part)

    def factors(
        self, parts: Sequence[Items], runs: Sequence[Run], whole: float
    ) -> list[float]:
        """Return each micro-batch's factor, such that the sum is the gradient of the
        large batch of weight `whole`.
        """
        if self.reduction == "sum":
            return [1.0] * len(runs)
        weights = [
            self.weight(part, run) for part, run in zip(parts, runs, strict=True)
        ]
        total = math.fsum(weights)
        if total == 0:
            return [0.0] * len(runs)
        if self.reduction == "sum_per_item":
            return [whole / total] * len(runs)
        return [weight / total for weight in weights]


class Coefficients(NamedTuple):
    """The sum of the micro-batches that comes nearest to the large batch."""

    best: tuple[float, ...]
    """By micro-batch, what its gradient is to be multiplied by."""
    used: tuple[float, ...]
    """By micro-batch, what accumulation multiplies its gradient by."""
    unexplained: float
    """||g - sum(c_k g_k)|| / sum(||c_k g_k||) with the best coefficients c_k, where g
    is the large batch's gradient: about a rounding where coefficients alone are wrong.
    """
    is_certain: bool
    """False: so much is unexplained that the coefficients mean nothing."""

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
"""The relative difference up to which coefficients are shown as the same."""
COEFFICIENT_ERROR = 0.02
"""The uncertainty up to which coefficients mean something: a part of the largest
one.
"""


class Bench:
    """One batch of a subject under comparison: `steps` micro-batches of the first
    partition, added up by `way`.
    """

    def __init__(
        self, subject: Subject, steps: int, way: Way, items: Items | None = None
    ) -> None:
        self.subject = subject
        self.steps = steps
        self.way = way
        self.items = tuple(range(subject.items) if items is None else items)
        self.partitions = partitions(self.items, steps)
        self._large: dict[Conditions, Run] = {}
        self._units: dict[Conditions, dict[str, float]] = {}

    def large(self, conditions: Conditions) -> Run:
        if conditions not in self._large:
            self._large[conditions] = self.subject.window([self.items], conditions)[0]
        return self._large[conditions]

    def accumulated(
        self, parts: Sequence[Items], conditions: Conditions, way: Way | None = None
    ) -> dict[str, Gradient]:
        return self.total(
            parts, self.subject.window(parts, conditions), conditions, way or self.way
        )

    def total(
        self,
        parts: Sequence[Items],
        runs: Sequence[Run],
        conditions: Conditions,
        way: Way,
    ) -> dict[str, Gradient]:
        if way.reduction == "sum_per_item":
            whole = way.weight(
                self.items, self.large(replace(conditions, perturbation=None))
            )
        else:
            whole = 1.0
        return combined(runs, way.factors(parts, runs, whole))

    def units(self, conditions: Conditions) -> dict[str, float]:
        if conditions not in self._units:
            self._units[conditions] = self._measured_units(conditions)
        return self._units[conditions]

    def apart(
        self, a: Gradients, b: Gradients, conditions: Conditions
    ) -> dict[str, float]:
        """Return by parameter how far two gradients are apart, in units; inf where one
        is not finite.
        """
        return self.apart_by(self.units(conditions), a, b)

    def apart_by(
        self, units: Mapping[str, float], a: Gradients, b: Gradients
    ) -> dict[str, float]:
        return {
            name: _in_units(self._distance(name, a, b), unit)
            for name, unit in units.items()
        }

    def errors(
        self, conditions: Conditions, way: Way | None = None
    ) -> dict[str, float]:
        """Return by parameter the worst partition's distance from the large batch, in
        units.
        """
        large = self.large(conditions).gradients
        every = [
            self.apart(self.accumulated(p.parts, conditions, way), large, conditions)
            for p in self.partitions
        ]
        return {
            name: max(errors[name] for errors in every) for name in self.subject.names
        }

    def right(self, conditions: Conditions, ways: Sequence[Way]) -> list[Way]:
        """Return those of `ways` by which every partition adds up to the large batch;
        runs each partition once.
        """
        large = self.large(conditions).gradients
        left = list(ways)
        for partition in self.partitions:
            runs = self.subject.window(partition.parts, conditions) if left else []
            totals = [
                (way, self.total(partition.parts, runs, conditions, way))
                for way in left
            ]
            left = [
                way
                for way, total in totals
                if not moved(self.apart(total, large, conditions))
            ]
        return left

    def coefficients(self, conditions: Conditions) -> Coefficients | None:
        """Return the coefficients by which the micro-batches of training come nearest
        to the large batch; None if their gradients do not tell.

        Each parameter counts in its units, so that large gradients do not hide small
        ones.
        """
        parts = self.partitions[0].parts
        runs = self.subject.window(parts, conditions)
        large = self.large(conditions)
        units = self.units(conditions)

        def product(a: Gradients, b: Gradients) -> float:
            return math.fsum(
                self.subject.dot(a[name], b[name]) / units[name] / units[name]
                for name in a.keys() & b.keys()
                if units[name]
            )

        def rest_of(values: Sequence[float]) -> tuple[list[float], float]:
            rest = difference(large.gradients, combined(runs, values))
            products = [product(run.gradients, rest) for run in runs]
            return products, math.sqrt(product(rest, rest))

        gram = [
            [product(one.gradients, other.gradients) for other in runs] for one in runs
        ]
        elements = sum(
            self.subject.precision(name).elements for name in large.gradients
        )
        try:
            solved = solve_coefficients(gram, rest_of, elements)
        except (OverflowError, ValueError):  # Of gradients that are not finite.
            return None
        is_certain = solved.uncertainty <= COEFFICIENT_ERROR
        if not is_certain and not solved.unexplained > COEFFICIENT_ERROR:
            return None
        factors = self.way.factors(parts, runs, self.way.weight(self.items, large))
        return Coefficients(
            solved.coefficients, tuple(factors), solved.unexplained, is_certain
        )

    def norm(self, gradient: Gradient) -> float:
        """Return the 2-norm; inf for NaN."""
        square = self.subject.dot(gradient, gradient)
        return math.sqrt(square) if square == square else math.inf

    def _distance(self, name: str, a: Gradients, b: Gradients) -> float:
        if name in a and name in b:
            return self.norm(a[name] - b[name])
        if name in a:
            return self.norm(a[name])
        if name in b:
            return self.norm(b[name])
        return 0.0

    def _measured_units(self, conditions: Conditions) -> dict[str, float]:
        found = self.floor(conditions)
        for parts in ((self.items,), self.partitions[0].parts):
            base = self.accumulated(parts, conditions)
            for number in range(PERTURBATIONS):
                moved = self.accumulated(
                    parts, replace(conditions, perturbation=number)
                )
                for name in found:
                    distance = self._distance(name, moved, base)
                    found[name] = max(
                        found[name], distance if math.isfinite(distance) else 0.0
                    )
        return found

    def floor(self, conditions: Conditions) -> dict[str, float]:
        """Return each unit's floor: the error of storing and adding up a gradient."""
        parts = self.partitions[0].parts
        runs = self.subject.window(parts, conditions)
        if self.way.reduction == "mean":
            factors = self.way.factors(parts, runs, 1.0)
        else:
            factors = [1.0] * len(runs)
        return {
            name: self._floor_of(name, runs, factors) for name in self.subject.names
        }

    def _floor_of(
        self, name: str, runs: Sequence[Run], factors: Sequence[float]
    ) -> float:
        """Bound the error relative to the micro-batches' gradients, and by the smallest
        number of the dtype.
        """
        exact = self.subject.precision(name)
        pairs = [
            (factor, run.gradients[name])
            for factor, run in zip(factors, runs, strict=True)
            if factor and name in run.gradients
        ]
        sizes = [factor * self.norm(gradient) for factor, gradient in pairs]
        relative = exact.roundoff + math.log2(max(exact.terms, 2)) * min(
            exact.roundoff, SUM_ROUNDOFF
        )
        return relative * math.fsum(
            size for size in sizes if math.isfinite(size)
        ) + len(runs) * exact.smallest * math.sqrt(exact.elements)


def combined(runs: Sequence[Run], factors: Sequence[float]) -> dict[str, Gradient]:
    """Return the sum of factor x gradient; a factor of 0 leaves its micro-batch out,
    even a NaN.
    """
    made: dict[str, Gradient] = {}
    for run, factor in zip(runs, factors, strict=True):
        for name, gradient in run.gradients.items() if factor else ():
            term = gradient * factor
            made[name] = made[name] + term if name in made else term
    return made


def difference(a: Gradients, b: Gradients) -> dict[str, Gradient]:
    names = [*a, *(name for name in b if name not in a)]
    return {
        name: (
            a[name] - b[name]
            if name in a and name in b
            else a[name] * 1.0
            if name in a
            else b[name] * -1.0
        )
        for name in names
    }


def moved(errors: Mapping[str, float]) -> tuple[str, ...]:
    """Return the parameters that moved by more than rounding."""
    return tuple(name for name, error in errors.items() if not error <= ROUNDING_LIMIT)


def _in_units(distance: float, unit: float) -> float:
    if distance == 0:
        return 0.0
    return distance / unit if unit and math.isfinite(distance) else math.inf
