"""Numbers per item that stand in the batch and might be what a mean loss divides by.

A mean over tokens divides by the labels that are no padding, a detector's loss by its positives, a weighted one by the sum of the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from operator import eq, le, lt, ne
from typing import NamedTuple

from gradaccum.verification.subject import Column

IGNORED = -100
"""`ignore_index` of torch's cross entropy unless given; others use it too."""

Row = Sequence[float]


class Count(NamedTuple):
    """A number per item."""

    where: str
    """What is counted: ``batch[1] != -100``."""
    code: str
    """What to write as ``weight=``."""
    values: tuple[float, ...]
    """One number >= 0 per item."""


def counts(columns: Sequence[Column]) -> list[Count]:
    """The counts to try, each with other values; those that are the same for every item say nothing."""
    found: dict[tuple[float, ...], Count] = {}
    for column in columns:
        for count in _counts_of(column):
            if len(set(count.values)) > 1 and min(count.values) >= 0:
                found.setdefault(count.values, count)
    return list(found.values())


def labels(columns: Sequence[Column]) -> list[Column]:
    """Those columns that have one value per item."""
    return [column for column in columns if all(len(row) == 1 for row in column.rows)]


def _counts_of(column: Column) -> Iterator[Count]:
    shifts = [("", slice(None))] + ([("[:, 1:]", slice(1, None)), ("[:, :-1]", slice(None, -1))] if column.sequence else [])
    for words, part in shifts:
        rows = [row[part] for row in column.rows]
        where = column.where + words
        for test, holds in _tests(column):
            yield _count(f"{where} {test}", f"({where} {test}).sum()", [float(sum(map(holds, row))) for row in rows])
        yield _count(f"the sum of {where}", f"{where}.sum()", [float(sum(row)) for row in rows])


def _tests(column: Column) -> Iterator[tuple[str, Callable[[float], bool]]]:
    if column.integers:
        yield f"!= {IGNORED}", partial(ne, IGNORED)
    yield "!= 0", partial(ne, 0)
    yield "== 0", partial(eq, 0)
    yield "> 0", partial(lt, 0)
    yield ">= 0", partial(le, 0)
    paddings = {row[-1] for row in column.rows if row} if column.integers and column.sequence else set()
    for padding in sorted(paddings - {0, IGNORED})[:3]:
        yield f"!= {padding:g}", partial(ne, padding)


def _count(where: str, code: str, values: Sequence[float]) -> Count:
    return Count(where, f"lambda *batch: {code}", tuple(values))
