"""The four ways to train: what each does with the large batches of one epoch.

Every run applies one update for each large batch. All runs but the naive loop must
apply the same updates, up to rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

from gradaccum_conformance.demo.batches import LARGE_BATCH, MICRO_BATCH, cut, split
from gradaccum_conformance.harness import Harness, Session
from gradaccum_conformance.specs import LENET, Batch

STEPS = 4

Epoch = Callable[[Harness, Session, Iterable[Batch]], None]


class Recipe(NamedTuple):
    """One run: whether its optimizer is wrapped, and what it does in an epoch."""

    name: str
    wrapped: bool
    exact: bool
    """Whether it must agree with the large batch."""
    epoch: Epoch


def with_large_batches(
    harness: Harness, session: Session, batches: Iterable[Batch]
) -> None:
    """The truth: forward and backward over the whole batch at once."""
    for batch in batches:
        session.micro_batch(batch)


def in_equal_parts(
    harness: Harness, session: Session, batches: Iterable[Batch]
) -> None:
    """Each batch in four equal micro-batches, the tail too."""
    for batch in batches:
        for part in split(batch, STEPS):
            session.micro_batch(part)


def in_unequal_parts(
    harness: Harness, session: Session, batches: Iterable[Batch]
) -> None:
    """Micro-batches of one size as a loader yields them, so that the tail is 16 + 12: a
    short window, closed by flush.
    """
    for batch in batches:
        for part in cut(batch, MICRO_BATCH):
            session.micro_batch(part, weight=part.items)
    session.flush()


def divided_by_steps(
    harness: Harness, session: Session, batches: Iterable[Batch]
) -> None:
    """The naive loop: each of the same micro-batches counts 1/4, whatever their number
    and size.

    Of four equal micro-batches that is the large batch's gradient, so only a tail is
    computed in parts.
    """
    for batch in batches:
        if batch.items == LARGE_BATCH:
            session.micro_batch(batch)
        else:
            gradients = [
                harness.gradient(LENET, session.parameters(), part, dtype="float32")
                for part in cut(batch, MICRO_BATCH)
            ]
            total = {
                name: np.sum([gradient[name] for gradient in gradients], axis=0)
                for name in gradients[0]
            }
            naive = {name: array / STEPS for name, array in total.items()}
            session.gradients(naive)


LARGE = Recipe("large batch", False, True, with_large_batches)
EQUAL = Recipe("accumulated in 4", True, True, in_equal_parts)
UNEQUAL = Recipe("accumulated, short tail", True, True, in_unequal_parts)
NAIVE = Recipe("naive loop, short tail", False, False, divided_by_steps)
RECIPES = (LARGE, EQUAL, UNEQUAL, NAIVE)
