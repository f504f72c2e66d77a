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
"""A weight is a float64. It travels as four integers of 16 bits, which float32 holds."""


class Numbers(NamedTuple):
    """What all workers together have in the window that ends."""

    weight: float
    overflow: bool
    micro_batches: int
    flushes: int
    """The workers that have run out of micro-batches."""
    present: list[bool]
    """By position: some worker has a sum there."""


def encode(fields: State, flushing: bool, present: Iterable[bool], rank: int, workers: int) -> list[float]:
    """The numbers of worker `rank`, to be added up elementwise over all `workers`."""
    weights = [0.0] * (_PARTS * workers)
    weights[_PARTS * rank : _PARTS * (rank + 1)] = struct.unpack("<4h", struct.pack("<d", fields.weight))
    return [*weights, fields.overflow, fields.micro_step, flushing, *present]


def decode(added: Sequence[float], workers: int) -> Numbers:
    """What the sum over the workers says."""
    split = _PARTS * workers
    weights = struct.unpack(f"<{workers}d", struct.pack(f"<{split}h", *map(int, added[:split])))
    overflows, micro_batches, flushes, *present = added[split:]
    return Numbers(math.fsum(weights), overflows > 0, int(micro_batches), int(flushes), [count > 0 for count in present])
