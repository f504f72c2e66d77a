"""Is there a reduction, a count of the batch or a weight per item by which the micro-batches add up to the large batch?

A mean whose denominator differs between micro-batches is made right by weights, a coupled loss by none. So where no count that stands in
the batch does it, the weights are measured: each item against the rest, by least squares over the gradients of all parameters.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from gradaccum.options import Reduction
from gradaccum.verification import causes
from gradaccum.verification.counts import counts, labels
from gradaccum.verification.measuring import ROUNDING_LIMIT, Bench, Way
from gradaccum.verification.report import Cause
from gradaccum.verification.subject import Column, Conditions

PROBE = 16
"""Items whose weights are measured, of a batch that has more: two runs each."""
BETTER, MUCH_BETTER = 4.0, 1000.0
"""How many times better than equal ones measured weights must be to explain anything, and how many if they are nearly equal. Weights of a
weighted mean are 50 times better in bfloat16 and 1e5 times in float32, those of a coupled loss 1.3 times, or more if it has one number."""
EQUAL, SAME = 1e-5, 1e-2
"""Relative difference up to which measured weights are equal; and nearly so, or one weight with one label in the report."""


class Measured(NamedTuple):
    """Weights of the items of a probe, and how well they do."""

    values: Mapping[int, float]
    error: float
    """The worst parameter, in units."""
    equal: float
    """The same with equal weights, or with the user's, whichever do better."""

    def explain(self) -> bool:
        """True if the micro-batches add up with these weights, and not with equal ones. Each weight is off by up to a unit itself."""
        weights = self.values.values()
        spread = (max(weights) - min(weights)) / max(weights)
        better = BETTER if spread > SAME else MUCH_BETTER
        return spread > EQUAL and self.error <= ROUNDING_LIMIT * len(weights) and self.error * better <= self.equal


def right_weights(bench: Bench, conditions: Conditions, infinite: str = "") -> tuple[Cause | None, float | None]:
    """The cause, if another reduction or other weights make it right; and by how many units the best weights are off, where measured.

    Args:
        bench: the batch.
        conditions: those without the causes found so far.
        infinite: which micro-batches have a gradient that is not finite, in words; "" if none has.
    """
    found = _other_reduction(bench, conditions) or _count(bench, conditions, infinite)
    if found is not None:
        return found, None
    try:
        with warnings.catch_warnings(action="ignore"):  # A deviation over one item is no news here.
            measured = _measured(bench, conditions)
    except Exception:  # The user's loss may refuse a single item; the user's own partitions did run.
        return None, None
    if measured is None or not measured.explain():
        return None, None if measured is None else measured.error
    return _described(bench, measured.values), None


def _other_reduction(bench: Bench, conditions: Conditions) -> Cause | None:
    reductions: tuple[Reduction, ...] = ("mean",) if bench.way.reduction == "sum" else ("sum", "mean")
    ways = [Way(reduction, [1.0] * bench.subject.items) for reduction in reductions]
    right = bench.right(conditions, ways)
    return causes.wrong_reduction(bench.way.reduction, right[0].reduction) if right else None


def _count(bench: Bench, conditions: Conditions, infinite: str) -> Cause | None:
    tried = [(count, Way("mean", count.values)) for count in counts(bench.subject.columns())]
    right = bench.right(conditions, [way for _, way in tried])
    return next((causes.unequal_count(count, infinite) for count, way in tried if way in right), None)


def _measured(bench: Bench, conditions: Conditions) -> Measured | None:
    """The weight of each item of a probe, and how well all of them together do; None where the best ones are no weights."""
    probe = Bench(bench.subject, min(4, len(bench.items)), bench.way, bench.items[:PROBE])
    values = {item: _share(probe, item, conditions) for item in probe.items}
    if not all(value >= -SAME for value in values.values()) or not sum(values.values()) > 0:
        return None
    way = Way("mean", [max(values.get(item, 0.0), 0.0) for item in range(bench.subject.items)])
    equal = min(_off(probe, other, conditions) for other in (probe.way, Way("mean", [1.0] * bench.subject.items)))
    off = max(_off(some, way, conditions) for some in (probe, _without(probe, max(values, key=values.__getitem__))))
    return Measured(values, off, equal)


def _without(probe: Bench, item: int) -> Bench:
    """The rest of a probe. A maximum gives one item all the weight, and in the rest another one; a weighted mean keeps its weights."""
    rest = [other for other in probe.items if other != item]
    return Bench(probe.subject, min(probe.steps, len(rest)), probe.way, rest)


def _off(bench: Bench, way: Way, conditions: Conditions) -> float:
    """By how many units the worst parameter is off; 0 where nothing has a weight and the gradient is zero or not finite."""
    large = bench.large(conditions).gradients
    if not way.weight(bench.items, bench.large(conditions)) and not any(0 < bench.norm(gradient) < math.inf for gradient in large.values()):
        return 0.0
    return max(bench.errors(conditions, way).values())


def _share(probe: Bench, item: int, conditions: Conditions) -> float:
    """The a that brings a x gradient(item) + (1 - a) x gradient(rest) closest to the large batch's gradient."""
    rest = [other for other in probe.items if other != item]
    (alone,), (others,) = (probe.subject.window([part], conditions) for part in ((item,), rest))
    if not all(math.isfinite(probe.norm(gradient)) for gradient in alone.gradients.values()):
        return 0.0  # A mean over nothing: the item has no weight, or the fit will tell.
    large, units = probe.large(conditions).gradients, probe.units(conditions)
    above = below = 0.0
    for name in large.keys() & alone.gradients.keys() & others.gradients.keys():
        toward, off = alone.gradients[name] - others.gradients[name], large[name] - others.gradients[name]
        scale = units[name] or 1.0
        above += probe.subject.dot(toward, off) / scale**2
        below += probe.subject.dot(toward, toward) / scale**2
    return above / below if below else 1 / len(probe.items)


def _described(bench: Bench, values: Mapping[int, float]) -> Cause:
    mean = math.fsum(values.values()) / len(values)
    weights = {item: value / mean for item, value in values.items()}
    for column in labels(bench.subject.columns()):
        by_label = _by_label(column, weights)
        if by_label is not None:
            return causes.unequal_weights([], column.where, by_label)
    return causes.unequal_weights(list(weights.values()), None, [])


def _by_label(column: Column, weights: Mapping[int, float]) -> Sequence[tuple[float, float]] | None:
    """One weight per label if items of a label weigh the same and labels repeat; None otherwise."""
    groups: dict[float, list[float]] = {}
    for item, weight in weights.items():
        groups.setdefault(column.rows[item][0], []).append(weight)
    same = all(max(group) - min(group) <= SAME * max(map(abs, group)) for group in groups.values())
    return [(label, group[0]) for label, group in groups.items()] if same and len(groups) < len(weights) else None
