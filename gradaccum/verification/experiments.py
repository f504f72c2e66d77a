"""Experiments that change one condition at a time: the loss's scale, the random
numbers, the state carried over, the mode.

Each returns a `Finding`: the causes, and the conditions for the next experiment,
without these causes.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from gradaccum.options import Reduction
from gradaccum.verification import causes
from gradaccum.verification.causes import counts, labels
from gradaccum.verification.measuring import (
    ROUNDING_LIMIT,
    Bench,
    Gradients,
    Way,
    cut,
    difference,
    moved,
)
from gradaccum.verification.report import Cause
from gradaccum.verification.subject import Column, Conditions, Gradient

TRAINING = Conditions()
FACTORS = (0.25, 8.0)
"""Powers of two: they scale every step of a linear backward pass exactly."""


class Finding(NamedTuple):
    """The result of one experiment."""

    causes: tuple[Cause, ...] = ()
    go_on: Conditions | None = TRAINING
    """The conditions without the cause; None: nothing more can be told."""


def finite(bench: Bench) -> Finding:
    """Test that the large batch's own gradient is finite."""
    gradients = bench.large(TRAINING).gradients
    bad = [
        name
        for name, gradient in gradients.items()
        if not math.isfinite(bench.norm(gradient))
    ]
    return Finding((causes.not_finite(bad),), None) if bad else Finding()


def repeatable(bench: Bench) -> Finding:
    """Test that the same batch gives the same gradient twice, to within the floor."""
    again = bench.subject.window([bench.items], TRAINING)[0].gradients
    names = moved(
        bench.apart_by(bench.floor(TRAINING), again, bench.large(TRAINING).gradients)
    )
    return Finding((causes.not_repeatable(names),), None) if names else Finding()


def linear(bench: Bench) -> Finding:
    """Test that the gradient scales with the loss. Scales that overflow are left
    out.
    """
    large = bench.large(TRAINING).gradients
    found = dict.fromkeys(bench.subject.names, 0.0)
    for factor in FACTORS:
        scaled = bench.subject.window([bench.items], replace(TRAINING, scale=factor))[
            0
        ].gradients
        if all(math.isfinite(bench.norm(gradient)) for gradient in scaled.values()):
            found = {
                name: max(found[name], error)
                for name, error in bench.apart(scaled, large, TRAINING).items()
            }
    names = moved(found)
    culprits = tuple(bench.subject.custom_rules())
    if names or culprits:
        return Finding((causes.custom_backward(names, culprits),), None)
    return Finding()


def fresh_numbers(bench: Bench) -> Finding:
    """Test that the random numbers follow the random state."""
    places = bench.subject.fixed_draws()
    return Finding((causes.shared_randomness(places),)) if places else Finding()


def replayed(bench: Bench, conditions: Conditions) -> Finding:
    """Test that random numbers can be replayed for the same items; if not, compare in
    evaluation mode.
    """
    places = bench.subject.unreplayed_draws()
    if not places:
        return Finding((), conditions)
    names = _follow_the_seed(bench, conditions)
    if not names:
        return Finding((), conditions)
    evaluation = replace(conditions, training=False)
    return Finding(
        (causes.randomness(places, names),),
        None if _follow_the_seed(bench, evaluation) else evaluation,
    )


def _follow_the_seed(bench: Bench, conditions: Conditions) -> tuple[str, ...]:
    other = bench.subject.window([bench.items], replace(conditions, seed=1))[
        0
    ].gradients
    return moved(bench.apart(other, bench.large(conditions).gradients, conditions))


def stateless(bench: Bench, conditions: Conditions) -> Finding:
    """Test that one micro-batch leaves nothing behind that changes the next one's
    gradient.
    """
    alone = replace(conditions, carry_state=False)
    changed: dict[str, None] = {}
    found: dict[str, float] = {}
    for partition in bench.partitions:
        runs = bench.subject.window(partition.parts, conditions)
        carried = bench.total(partition.parts, runs, conditions, bench.way)
        put_back = bench.accumulated(partition.parts, alone)
        apart = bench.apart(
            *_without_same_infinities(bench, carried, put_back), conditions
        )
        found = {
            name: max(found.get(name, 0.0), error) for name, error in apart.items()
        }
        changed |= dict.fromkeys(name for run in runs for name in run.changed)
    names = moved(found)
    if names:
        return Finding((causes.state(tuple(changed), names),), alone)
    return Finding((), conditions)


def _without_same_infinities(
    bench: Bench, a: Gradients, b: Gradients
) -> tuple[Gradients, Gradients]:
    both = {
        name
        for name in a.keys() & b.keys()
        if not any(math.isfinite(bench.norm(sums[name])) for sums in (a, b))
    }
    left_a, left_b = (
        {name: gradient for name, gradient in sums.items() if name not in both}
        for sums in (a, b)
    )
    return left_a, left_b


def infinite_parts(bench: Bench, conditions: Conditions) -> dict[str, str]:
    """Return the parameters whose gradient is not finite in some micro-batches, and
    which, in words.
    """
    found: dict[str, str] = {}
    for partition in bench.partitions:
        runs = bench.subject.window(partition.parts, conditions)
        for name in bench.subject.names:
            bad = sum(
                name in run.gradients
                and not math.isfinite(bench.norm(run.gradients[name]))
                for run in runs
            )
            if bad:
                found.setdefault(
                    name, f"{bad} of {len(runs)} micro-batches ({partition.words})"
                )
    return found


def apart_in_evaluation(bench: Bench, conditions: Conditions) -> Finding:
    """Test whether evaluation mode, in which statistics are those of before, keeps the
    items apart.
    """
    layers = bench.subject.statistics_layers() if conditions.training else ()
    evaluation = replace(conditions, training=False)
    settled = conditions.training and not moved(bench.errors(evaluation))
    if not (layers or settled):
        return Finding((), conditions)
    return Finding((causes.batch_statistics(layers, settled),), evaluation)


# Does the loss add terms that micro-batches divide otherwise than the large batch does?
#
# Is there a part of the gradient that grows or shrinks with the number of
# micro-batches?
#
# Let the gradient be a part A that accumulates and a part B that does not. Under "sum"
# a term that each micro-batch adds in full gives A + N B: its error (N - 1) B triples
# from two micro-batches to four. Under "mean" a term that is a sum gives A + B / N: its
# error (1/N - 1) B grows by a half. Both errors stay the same when the items are dealt
# otherwise. A coupled loss does neither.

TWO = 2
FOUR = 4

Errors = Mapping[int, list[dict[str, Gradient]]]
"""By the number of micro-batches: items in order, and dealt in turn."""


def counted_terms(
    bench: Bench, conditions: Conditions, names: tuple[str, ...]
) -> tuple[Cause | None, tuple[str, ...]]:
    """Return the cause, and which of `names`, the parameters that moved, it
    explains.
    """
    usable = len(bench.items) // FOUR * FOUR
    if not usable:
        return None, ()
    small = Bench(bench.subject, FOUR, Way(bench.way.reduction), bench.items[:usable])
    errors = {
        steps: [_error(small, steps, dealt, conditions) for dealt in (False, True)]
        for steps in (TWO, FOUR)
    }
    growth = 1.5 if bench.way.reduction == "mean" else 3.0
    units = small.units(conditions)
    explained = tuple(
        name for name in names if _is_counted(small, name, errors, growth, units[name])
    )
    if not explained:
        return None, ()
    made = causes.summed_term if bench.way.reduction == "mean" else causes.repeated_term
    return made(explained), explained


def _error(
    bench: Bench, steps: int, dealt: bool, conditions: Conditions
) -> dict[str, Gradient]:
    items = bench.items
    if dealt:
        parts = tuple(items[start::steps] for start in range(steps))
    else:
        parts = cut(items, len(items) // steps)
    return difference(
        bench.accumulated(parts, conditions), bench.large(conditions).gradients
    )


def _is_counted(
    bench: Bench, name: str, errors: Errors, growth: float, unit: float
) -> bool:
    if any(name not in error for pair in errors.values() for error in pair):
        return False
    two, two_dealt = (error[name] for error in errors[TWO])
    four, four_dealt = (error[name] for error in errors[FOUR])
    # Each of the two errors may be off by ROUNDING_LIMIT units, and one is multiplied.
    room = 2 * growth * ROUNDING_LIMIT * unit
    off = (two - two_dealt, four - four_dealt, four - two * growth)
    return bench.norm(four) > room and all(
        bench.norm(gradient) <= min(room, bench.norm(four) / FOUR) for gradient in off
    )


def by_place(bench: Bench, conditions: Conditions, names: Sequence[str]) -> bool:
    """True if an item's gradient depends on its place in the micro-batch and on no
    other item: two pairs may swap second items.
    """
    if len(bench.items) < FOUR:
        return False
    a, b, c, d = bench.items[:FOUR]
    try:
        pairs = [
            bench.accumulated(((a, b), (c, d)), conditions),
            bench.accumulated(((a, d), (c, b)), conditions),
        ]
        turned = bench.accumulated(((b, a), (c, d)), conditions)
    except Exception:  # The user's loss may refuse two items.
        return False
    same, other = (
        bench.apart(pairs[0], gradients, conditions) for gradients in (pairs[1], turned)
    )
    return all(same[name] <= ROUNDING_LIMIT for name in names) and any(
        other[name] > ROUNDING_LIMIT for name in names
    )


# Is there a reduction, a count of the batch or a weight per item by which the
# micro-batches add up to the large batch?
#
# A mean whose denominator differs between micro-batches is made right by weights, a
# coupled loss by none. So where no count that stands in the batch does it, the weights
# are measured: each item against the rest, by least squares over the gradients of all
# parameters.


PROBE = 16
"""Items whose weights are measured, of a batch that has more: two runs each."""
BETTER, MUCH_BETTER = 4.0, 1000.0
"""How many times better than equal ones measured weights must be to explain anything,
and how many if they are nearly equal. Weights of a weighted mean are 50 times better in
bfloat16 and 1e5 times in float32, those of a coupled loss 1.3 times, or more if it has
one number.
"""
EQUAL, SAME = 1e-5, 1e-2
"""Relative difference up to which measured weights are equal; and nearly so, or one
weight with one label in the report.
"""


class Measured(NamedTuple):
    """Weights of the items of a probe, and their error."""

    values: Mapping[int, float]
    error: float
    """The worst parameter, in units."""
    equal: float
    """The same with equal weights, or with the user's, whichever do better."""

    def explain(self) -> bool:
        """True if the micro-batches add up with these weights, each off by up to a
        unit, and not with equal ones.
        """
        weights = self.values.values()
        spread = (max(weights) - min(weights)) / max(weights)
        better = BETTER if spread > SAME else MUCH_BETTER
        return (
            spread > EQUAL
            and self.error <= ROUNDING_LIMIT * len(weights)
            and self.error * better <= self.equal
        )


def right_weights(
    bench: Bench, conditions: Conditions, infinite: str = ""
) -> tuple[Cause | None, float | None]:
    """Return the cause if another reduction or other weights make it right, and the
    best weights' error in units, where measured.

    `infinite` says which micro-batches have a non-finite gradient; "" if none has.
    """
    found = _other_reduction(bench, conditions) or _count(bench, conditions, infinite)
    if found is not None:
        return found, None
    try:
        # A deviation over one item is no news here.
        with warnings.catch_warnings(action="ignore"):
            measured = _measured(bench, conditions)
    except Exception:
        # The user's loss may refuse a single item; the user's own partitions did run.
        return None, None
    if measured is None or not measured.explain():
        return None, None if measured is None else measured.error
    return _described(bench, measured.values), None


def _other_reduction(bench: Bench, conditions: Conditions) -> Cause | None:
    reductions: tuple[Reduction, ...] = (
        ("mean",) if bench.way.reduction == "sum" else ("sum", "mean")
    )
    ways = [Way(reduction, [1.0] * bench.subject.items) for reduction in reductions]
    right = bench.right(conditions, ways)
    if right:
        return causes.wrong_reduction(bench.way.reduction, right[0].reduction)
    return None


def _count(bench: Bench, conditions: Conditions, infinite: str) -> Cause | None:
    tried = [
        (count, Way("mean", count.values)) for count in counts(bench.subject.columns())
    ]
    right = bench.right(conditions, [way for _, way in tried])
    return next(
        (causes.unequal_count(count, infinite) for count, way in tried if way in right),
        None,
    )


def _measured(bench: Bench, conditions: Conditions) -> Measured | None:
    """Measure each item's weight; None where the best numbers are no weights."""
    probe = Bench(
        bench.subject, min(4, len(bench.items)), bench.way, bench.items[:PROBE]
    )
    values = {item: _share(probe, item, conditions) for item in probe.items}
    if (
        not all(value >= -SAME for value in values.values())
        or not sum(values.values()) > 0
    ):
        return None
    way = Way(
        "mean", [max(values.get(item, 0.0), 0.0) for item in range(bench.subject.items)]
    )
    equal = min(
        _worst_error(probe, other, conditions)
        for other in (probe.way, Way("mean", [1.0] * bench.subject.items))
    )
    off = max(
        _worst_error(some, way, conditions)
        for some in (probe, _without(probe, max(values, key=values.__getitem__)))
    )
    return Measured(values, off, equal)


def _without(probe: Bench, item: int) -> Bench:
    """Return the rest of a probe. A weighted mean keeps its weights there; a maximum
    picks another item.
    """
    rest = [other for other in probe.items if other != item]
    return Bench(probe.subject, min(probe.steps, len(rest)), probe.way, rest)


def _worst_error(bench: Bench, way: Way, conditions: Conditions) -> float:
    """Return the worst parameter's error in units; 0 where nothing has a weight and the
    gradient is zero or not finite.
    """
    large = bench.large(conditions).gradients
    if not way.weight(bench.items, bench.large(conditions)) and not any(
        0 < bench.norm(gradient) < math.inf for gradient in large.values()
    ):
        return 0.0
    return max(bench.errors(conditions, way).values())


def _share(probe: Bench, item: int, conditions: Conditions) -> float:
    """Return the a that brings a x gradient(item) + (1 - a) x gradient(rest) closest to
    the large batch's gradient.
    """
    rest = [other for other in probe.items if other != item]
    (alone,), (others,) = (
        probe.subject.window([part], conditions) for part in ((item,), rest)
    )
    if not all(
        math.isfinite(probe.norm(gradient)) for gradient in alone.gradients.values()
    ):
        return 0.0  # A mean over nothing: the item has no weight, or the fit will tell.
    large = probe.large(conditions).gradients
    units = probe.units(conditions)
    above = below = 0.0
    for name in large.keys() & alone.gradients.keys() & others.gradients.keys():
        toward = alone.gradients[name] - others.gradients[name]
        off = large[name] - others.gradients[name]
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


def _by_label(
    column: Column, weights: Mapping[int, float]
) -> Sequence[tuple[float, float]] | None:
    """Return one weight per label if items of a label weigh the same and labels repeat;
    else None.
    """
    groups: dict[float, list[float]] = {}
    for item, weight in weights.items():
        groups.setdefault(column.rows[item][0], []).append(weight)
    same = all(
        max(group) - min(group) <= SAME * max(map(abs, group))
        for group in groups.values()
    )
    if same and len(groups) < len(weights):
        return [(label, group[0]) for label, group in groups.items()]
    return None
