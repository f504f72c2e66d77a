"""Is there a part of the gradient that grows or shrinks with the number of micro-batches?

Let the gradient be a part A that accumulates and a part B that does not. Under "sum" a term that each micro-batch adds in full gives
A + N B: its error (N - 1) B triples from two micro-batches to four. Under "mean" a term that is a sum gives A + B / N: its error
(1/N - 1) B grows by a half. Both errors stay the same when the items are dealt otherwise. A coupled loss does neither.
"""

from __future__ import annotations

from collections.abc import Mapping

from gradaccum.verification import causes
from gradaccum.verification.measuring import ROUNDING_LIMIT, Bench, Gradients, Way
from gradaccum.verification.partitions import cut
from gradaccum.verification.report import Cause
from gradaccum.verification.subject import Conditions, Gradient

TWO, FOUR = 2, 4

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
    return all(bench.norm(gradient) <= room for gradient in off) and bench.norm(four) > room


def _difference(a: Gradients, b: Gradients) -> dict[str, Gradient]:
    names = [*a, *(name for name in b if name not in a)]
    return {name: a[name] - b[name] if name in a and name in b else a[name] * 1.0 if name in a else b[name] * -1.0 for name in names}
