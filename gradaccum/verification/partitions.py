"""The ways in which one batch is divided and ordered. A loss that accumulates does not tell them apart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from gradaccum.splitting import size_for


class Partition(NamedTuple):
    """One way to divide a batch into micro-batches."""

    words: str
    """What it is, for the report."""
    parts: tuple[tuple[int, ...], ...]
    """The items of each micro-batch, in order."""


def partitions(items: Sequence[int], steps: int) -> list[Partition]:
    """The partitions to compare with the large batch; the first is the one that training would make.

    No micro-batch has one item unless `steps` asks for that: a batch norm refuses a single one, which would hide what it does to two.

    Args:
        items: the items of the batch, in its order.
        steps: micro-batches of the first partition.
    """
    size = size_for(len(items), steps)
    steps = -(-len(items) // size)
    long = 2 * size if len(items) >= 3 * size else size
    made = [
        Partition(f"{steps} micro-batches in order", cut(items, size)),
        Partition(f"{steps} micro-batches, items dealt in turn", tuple(tuple(items[start::steps]) for start in range(steps))),
        Partition(f"{steps} micro-batches, the last one first", cut(items, size)[::-1]),
        Partition("micro-batches of unequal size", (tuple(items[:long]), *cut(items[long:], size))),
        Partition("two halves", cut(items, -(-len(items) // 2))),
        Partition("the large batch, items in reverse order", (tuple(items[::-1]),)),
    ]
    return [partition for place, partition in enumerate(made) if partition.parts not in [other.parts for other in made[:place]]]


def cut(items: Sequence[int], size: int) -> tuple[tuple[int, ...], ...]:
    """`items` in micro-batches of `size`, in order; the last one may be smaller."""
    return tuple(tuple(items[start : start + size]) for start in range(0, len(items), size))


def item_axis(large: Sequence[int], small: Sequence[int], items: int, part: int) -> int | None:
    """The axis along which an array has one row, or equally many, per item; None if there is none, or several.

    Inside a model the batch axis is not marked. The array's shape in the `large` batch of `items` and in one of `part` items shows it.
    """
    if len(large) != len(small):
        return None
    differing = [axis for axis, (a, b) in enumerate(zip(large, small, strict=True)) if a != b]
    if len(differing) != 1:
        return None
    a, b = large[differing[0]], small[differing[0]]
    return differing[0] if a % items == 0 and b == a // items * part else None
