"""Does the loss add terms that micro-batches divide otherwise than the large batch does?

Is there a part of the gradient that grows or shrinks with the number of micro-batches?

Let the gradient be a part A that accumulates and a part B that does not. Under "sum" a term that each micro-batch adds in full gives
A + N B: its error (N - 1) B triples from two micro-batches to four. Under "mean" a term that is a sum gives A + B / N: its error
(1/N - 1) B grows by a half. Both errors stay the same when the items are dealt otherwise. A coupled loss does neither.

Are there terms that divide by different counts? Then the gradient of a micro-batch M is a sum, over counts c, of A_c(M) / c(M), where A_c
adds up over items. For given counts that is linear in the unknown A_c of each item, and there are more micro-batches of few items than
unknowns: the gradients of a coupled loss do not fit. Numbers are fitted in place of gradients: their products with a few directions.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, combinations, islice
from operator import mul

from gradaccum.verification import causes
from gradaccum.verification.counts import Count, counts
from gradaccum.verification.measuring import ROUNDING_LIMIT, Bench, Gradients, Way
from gradaccum.verification.partitions import cut
from gradaccum.verification.report import Cause
from gradaccum.verification.subject import Conditions, Gradient, Items

TWO, FOUR = 2, 4
PROBE, PARTS = 6, 41
"""Items whose gradients are fitted, and micro-batches of few of them: of six each alone, each pair, each three."""
SPARE = 4
"""How many more gradients than unknowns there must be."""
BETTER = 16.0
"""How much better two counts must fit than one."""
CANDIDATES = 24
"""Counts that are tried, two at a time, alone and beside the number of items."""

Errors = Mapping[int, list[dict[str, Gradient]]]
"""By the number of micro-batches: items in order, and items dealt in turn."""


def counted_terms(bench: Bench, conditions: Conditions, names: tuple[str, ...]) -> tuple[Cause | None, tuple[str, ...]]:
    """The cause, and which of `names`, the parameters that moved, it explains."""
    usable = len(bench.items) // FOUR * FOUR
    if not usable:
        return None, ()
    small = Bench(bench.subject, FOUR, Way(bench.way.reduction), bench.items[:usable])
    errors = {steps: [_error(small, steps, dealt, conditions) for dealt in (False, True)] for steps in (TWO, FOUR)}
    growth = 1.5 if bench.way.reduction == "mean" else 3.0
    units = small.units(conditions)
    explained = tuple(name for name in names if _is_counted(small, name, errors, growth, units[name]))
    if not explained:
        return None, ()
    made = causes.summed_term if bench.way.reduction == "mean" else causes.repeated_term
    return made(explained), explained


def _error(bench: Bench, steps: int, dealt: bool, conditions: Conditions) -> dict[str, Gradient]:
    """Accumulated gradient - the large batch's."""
    items = bench.items
    parts = tuple(items[start::steps] for start in range(steps)) if dealt else cut(items, len(items) // steps)
    return _difference(bench.accumulated(parts, conditions), bench.large(conditions).gradients)


def _is_counted(bench: Bench, name: str, errors: Errors, growth: float, unit: float) -> bool:
    if any(name not in error for pair in errors.values() for error in pair):
        return False
    two, two_dealt = (error[name] for error in errors[TWO])
    four, four_dealt = (error[name] for error in errors[FOUR])
    room = 2 * growth * ROUNDING_LIMIT * unit  # Each of the two errors may be off by ROUNDING_LIMIT units, and one is multiplied.
    off = (two - two_dealt, four - four_dealt, four - two * growth)
    return bench.norm(four) > room and all(bench.norm(gradient) <= min(room, bench.norm(four) / FOUR) for gradient in off)


def _difference(a: Gradients, b: Gradients) -> dict[str, Gradient]:
    names = [*a, *(name for name in b if name not in a)]
    return {name: a[name] - b[name] if name in a and name in b else a[name] * 1.0 if name in a else b[name] * -1.0 for name in names}


def several_counts(bench: Bench, conditions: Conditions, names: Sequence[str]) -> Cause | None:
    """The cause, if `names` fit a sum of terms that divide by two or three counts, and by no single one; None otherwise."""
    items = Count("the number of items", "", (1.0,) * bench.subject.items)
    found = [items, *counts(bench.subject.columns())[:CANDIDATES]]
    several = {tuple(count.values[item] for count in found): item for item in reversed(bench.items)}.values()
    probe = tuple(dict.fromkeys([*several, *bench.items]))[:PROBE]
    parts = list(islice(chain.from_iterable(combinations(probe, size) for size in range(1, len(probe) + 1)), PARTS))
    try:
        with warnings.catch_warnings(action="ignore"):  # A deviation over one item is no news here.
            products, room = _products(bench, parts, conditions, names)
    except Exception:  # The user's loss may refuse a single item.
        return None
    finite = [place for place in range(len(parts)) if all(math.isfinite(row[place]) for row in products)]
    rows, series = [parts[place] for place in finite], [[row[place] for place in finite] for row in products]
    room = [limit or 1.0 for limit in room]

    def off(basis: Sequence[list[float]]) -> float:
        """By how much the gradients miss the span of `basis`, in what rounding may explain; inf if they hardly can."""
        return max(map(partial(_off, basis), series, room)) if len(basis) + SPARE <= len(rows) else math.inf

    columns = [list(_terms(rows, probe, count)) for count in found]
    single = [_basis(each, _basis([[1.0] * len(rows)])) for each in columns]
    alone = min(map(off, single))
    for one, other in combinations(range(len(found)), 2) if 1 < alone < math.inf else ():
        both = _basis(columns[other], single[one])
        for chosen, basis in (((one, other), both), ((0, one, other), _basis(columns[0], both))):
            if off(basis) <= min(1.0, alone / BETTER):
                return causes.several_counts(names, [found[place].where for place in chosen])
    return None


def _products(bench: Bench, parts: Sequence[Items], conditions: Conditions, names: Sequence[str]) -> tuple[list[list[float]], list[float]]:
    """The gradient of each of `parts` times a few directions, in units; and how far rounding alone may move each of these."""
    units = {name: bench.units(conditions)[name] or 1.0 for name in names}
    alone = [bench.subject.window([part], conditions)[0].gradients for part in parts[:2]]
    finite = [each for each in alone if all(math.isfinite(bench.norm(gradient)) for gradient in each.values())]
    directions = [bench.large(conditions).gradients, *finite]
    made: list[list[float]] = [[] for _ in directions]
    for part in parts:
        gradients = bench.subject.window([part], conditions)[0].gradients
        for row, direction in zip(made, directions, strict=True):
            both = [name for name in names if name in gradients and name in direction]
            row.append(math.fsum(bench.subject.dot(gradients[name], direction[name]) / units[name] ** 2 for name in both))
    sizes = [math.fsum(bench.norm(direction[name]) / units[name] for name in names if name in direction) for direction in directions]
    return made, [ROUNDING_LIMIT * size for size in sizes]


def _terms(parts: Sequence[Items], probe: Items, count: Count) -> Iterator[list[float]]:
    """What the unknown of each item is multiplied by in each of `parts`; where the count is 0 there is no term."""
    totals = [math.fsum(count.values[item] for item in part) for part in parts]
    for item in probe:
        yield [1 / total if item in part and total else 0.0 for part, total in zip(parts, totals, strict=True)]


def _basis(columns: Sequence[list[float]], begun: Sequence[list[float]] = ()) -> list[list[float]]:
    """Orthonormal vectors that span `columns` and those of `begun`, by Gram and Schmidt, twice."""
    made = list(begun)
    for column in columns:
        left = _rest(made, _rest(made, column))
        size = math.hypot(*left)
        if size > 1e-9 * math.hypot(*column):
            left = _rest(made, [number / size for number in left])
            made.append([number / math.hypot(*left) for number in left])
    return made


def _rest(basis: Sequence[list[float]], column: list[float]) -> list[float]:
    """What of `column` is orthogonal to `basis`."""
    for vector in basis:
        along = sum(map(mul, vector, column))
        column = [a - along * b for a, b in zip(column, vector, strict=True)]
    return column


def _off(basis: Sequence[list[float]], row: list[float], room: float) -> float:
    return max(map(abs, _rest(basis, _rest(basis, row)))) / room


def by_place(bench: Bench, conditions: Conditions, names: Sequence[str]) -> bool:
    """True if an item's gradient depends on its place in the micro-batch and on no other item: two pairs may swap their second items."""
    if len(bench.items) < FOUR:
        return False
    a, b, c, d = bench.items[:FOUR]
    pairs = [bench.accumulated(((a, b), (c, d)), conditions), bench.accumulated(((a, d), (c, b)), conditions)]
    turned = bench.accumulated(((b, a), (c, d)), conditions)
    same, other = (bench.apart(pairs[0], gradients, conditions) for gradients in (pairs[1], turned))
    return all(same[name] <= ROUNDING_LIMIT for name in names) and any(other[name] > ROUNDING_LIMIT for name in names)
