"""The demo's data, and its large batches and micro-batches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from gradaccum_conformance.specs import Batch

LARGE_BATCH = 64
MICRO_BATCH = 16


class Digits(NamedTuple):
    """Images, shape (items, 1, 8, 8), standardised by the mean and deviation of the
    training pixels, and labels 0 to 9.
    """

    train: Batch
    test: Batch


def large_batches(train: Batch, epoch: int) -> Iterator[Batch]:
    """`train` in an order drawn anew for each epoch, the same for every run, in large
    batches; the last has the items left over.
    """
    order = np.random.default_rng(epoch).permutation(train.items)
    return cut(Batch(train.x[order], train.y[order]), LARGE_BATCH)


def cut(batch: Batch, size: int) -> Iterator[Batch]:
    """`batch` in pieces of `size` items; the last has the items left over."""
    return (batch.rows(start, start + size) for start in range(0, batch.items, size))


def split(batch: Batch, pieces: int) -> Iterator[Batch]:
    """`batch` in `pieces` equal pieces."""
    assert batch.items % pieces == 0
    return cut(batch, batch.items // pieces)
