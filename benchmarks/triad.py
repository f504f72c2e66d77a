"""The machine's memory bandwidth: the large-array triad ``a = b + s * c``, the
yardstick of every bandwidth question.

STREAM's fourth kernel (J. McCalpin, "Memory Bandwidth and Machine Balance in Current
High Performance Computers", 1995): two arrays are read and one is written, and these
three are what is counted. An accumulation counts the same three, but its sum is read
before it is written. The triad's result is not, so a processor that fetches a line
before it writes to it moves four arrays for the three counted: there an accumulation at
full speed comes out above the triad, at up to 4 / 3 of its GB/s and more, as it has
less to compute. What one core can do of an accumulation is therefore measured too, as
NumPy's addition in place.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

NAME = "NumPy triad"
ADDITION = "NumPy addition in place"
ELEMENTS = 2**24
"""float32: 64 MiB an array. With the other contestants' turns between two of its own,
none finds its arrays in a cache.
"""
TENSORS = 16
"""That an accumulation's elements are in, as a model's are."""
SHAPE = (ELEMENTS // TENSORS // 1024, 1024)
"""Of each of them."""
SCALE = 0.5
BLOCK = 2**17
"""Elements worked on at a time: three such blocks are 1.5 MiB, so that the product is
still in a cache when it is added to.
"""
GRADIENT = 2.0**-20
"""What is added, everywhere: a sum of thousands of them is finite and exact."""

Floats = NDArray[np.float32]


def one_core() -> None:
    """Keep this process, and the threads it is yet to start, on one core where the
    system can: what is compared then has the same means.
    """
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})


def triad(a: Floats, b: Floats, c: Floats) -> None:
    """Write ``b + SCALE * c`` to `a`, all of shape (n,), block by block: each array
    crosses the memory bus once, without a temporary.
    """
    for start in range(0, a.size, BLOCK):
        block = slice(start, start + BLOCK)
        np.multiply(c[block], SCALE, out=a[block])
        np.add(a[block], b[block], out=a[block])


def yardsticks() -> dict[str, Callable[[], object]]:
    """The triad and the addition over arrays of their own."""
    return {NAME: _triad(), ADDITION: _addition()}


def moved(*itemsizes: int) -> float:
    """Bytes that one pass must move.

    Args:
        itemsizes: bytes per element of each operand, once for a read and once for a
            write: sum, gradient, sum.
    """
    return float(ELEMENTS * sum(itemsizes))


FLOAT32 = moved(4, 4, 4)
"""What the triad counts, and an accumulation of float32 gradients."""
YARDSTICKS = {NAME: FLOAT32, ADDITION: FLOAT32}


def rates(bytes_moved: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """What a `Case` is told of them, by contestant."""
    return {name: {"GB/s": size / 1e9} for name, size in bytes_moved.items()}


def _triad() -> Callable[[], object]:
    a, b, c = (_full(value) for value in (0.0, 1.0, 2.0))
    return lambda: triad(a, b, c)


def _addition() -> Callable[[], object]:
    total, gradient = _full(0.0), _full(GRADIENT)
    return lambda: np.add(total, gradient, out=total)


def _full(value: float) -> Floats:
    """Every page is written, so that none is the system's shared page of zeros."""
    return np.full(ELEMENTS, value, np.float32)
