"""The few numbers that a window's end adds up beside the sums, as elements that ride in the first bucket of sums.

Each is a count, or stands in elements that one worker alone fills. So all additions are exact in float32, in any order, and a bucket of
either dtype brings the same numbers to every worker.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from gradaccum.kit import State

_PARTS = 4
"""A weight or a loss is a float64. It travels as four integers of 16 bits, which float32 holds."""


class Numbers(NamedTuple):
    """What all workers together have in the window that ends."""

    weight: float
    overflow: bool
    micro_batches: int
    flushes: int
    """The workers that have run out of micro-batches."""
    present: list[bool]
    """By position: some worker has a sum there."""
    others: list[float]
    """The sums of the other numbers that were given."""
    counts: list[float] = []  # noqa: RUF012
    """The sums of the counts that were given."""


def encode(
    fields: State,
    flushing: bool,
    present: Iterable[bool],
    rank: int,
    workers: int,
    others: Sequence[float] = (),
    counts: Sequence[float] = (),
) -> list[float]:
    """The numbers of worker `rank`, to be added up elementwise over all `workers`; as many `others` and small `counts` on each."""
    own = fields.weight, *others
    size = _PARTS * len(own)
    parts = [0.0] * (size * workers)
    parts[size * rank : size * (rank + 1)] = struct.unpack(f"<{size}h", struct.pack(f"<{len(own)}d", *own))
    return [*parts, fields.overflow, fields.micro_step, flushing, *counts, *present]


def decode(added: Sequence[float], workers: int, others: int = 0, counts: int = 0) -> Numbers:
    """What the sum over the workers says, each of which has so many `others` and `counts`."""
    each = 1 + others
    split = _PARTS * each * workers
    values = struct.unpack(f"<{each * workers}d", struct.pack(f"<{split}h", *map(int, added[:split])))
    overflows, micro_batches, flushes, *rest = added[split:]
    known = overflows > 0, int(micro_batches), int(flushes), [count > 0 for count in rest[counts:]]
    # Not by fsum: it raises where an inf meets its opposite.
    return Numbers(math.fsum(values[::each]), *known, [sum(values[1 + index :: each]) for index in range(others)], rest[:counts])
