"""The worth of exactness: accuracy and loss on held-out digits against updates, where
an epoch's last window is short and uneven.

The last of an epoch's 23 windows holds two micro-batches, of 16 and 12 items, not four
of 16. Who divides that by 4, or averages the two as if they were equal, applies another
update than the large batch does. gradaccum makes the same, up to rounding. One such
window in 23 seldom shows in the accuracy; it shows in the distance to the large batch's
parameters, which is counted. Nothing is timed. Every curve is a median over the seeds;
what is left over by `optax.MultiSteps` and by MindSpore's tutorials at an epoch's end
they keep for the next, so their curves are drawn at the windows that have gone by and
not at their updates, which are half a window behind after every other epoch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import find_spec
from typing import NamedTuple

import numpy as np

from benchmarks.case import Curve
from benchmarks.contestants.digits import (
    Digits,
    Parameters,
    distance,
    first_parameters,
    held_out,
    load,
    windows,
)
from benchmarks.contestants.runs import LARGE, Run

SEEDS, EPOCHS = 5, 10
QUICK_SEEDS, QUICK_EPOCHS = 2, 3
FRAMEWORKS = {
    "torch": "benchmarks.contestants.quality_torch",
    "JAX": "benchmarks.contestants.quality_jax",
    "MindSpore": "benchmarks.contestants.quality_mindspore",
}

Makers = dict[str, Callable[[Parameters], Run]]


class Trained(NamedTuple):
    """One run, from one seed."""

    accuracies: list[float]
    """Before the first epoch, and after each."""
    losses: list[float]
    parameters: Parameters


def cases(quick: bool) -> Iterator[Curve]:
    digits, (seeds, epochs) = (
        load(),
        (QUICK_SEEDS, QUICK_EPOCHS) if quick else (SEEDS, EPOCHS),
    )
    for framework, module in FRAMEWORKS.items():
        if find_spec(framework.lower()):
            yield from curves(
                framework, import_module(module).runs(), digits, epochs, seeds
            )


def curves(
    framework: str, makers: Makers, digits: Digits, epochs: int, seeds: int
) -> Iterator[Curve]:
    """Two curves for each contestant, the first of which must be the large batch."""
    found = {
        name: [train(make, digits, seed, epochs) for seed in range(seeds)]
        for name, make in makers.items()
    }
    updates = [
        float(epoch * len(list(windows(digits.train, 0, 0))))
        for epoch in range(epochs + 1)
    ]
    for name, trained in found.items():
        counts = {
            "largest distance to the large batch": furthest(trained, found[LARGE])
        }
        for field, label in (
            ("accuracies", "held-out accuracy"),
            ("losses", "held-out loss, nats"),
        ):
            values = np.array([getattr(run, field) for run in trained])
            spread = {
                "lowest at the end": float(values[:, -1].min()),
                "highest at the end": float(values[:, -1].max()),
            }
            middle = np.median(values, axis=0).tolist()
            yield Curve(
                f"{framework}: {label}",
                name,
                updates,
                middle,
                "updates",
                label,
                counts | spread,
            )


def train(
    make: Callable[[Parameters], Run], digits: Digits, seed: int, epochs: int
) -> Trained:
    """`epochs` from the seed's parameters on the seed's windows."""
    first = first_parameters(seed)
    run, looks = make(first), [held_out(first, digits.test)]
    for epoch in range(epochs):
        run.epoch(windows(digits.train, seed, epoch))
        looks.append(held_out(run.parameters(), digits.test))
    return Trained(
        [look[0] for look in looks], [look[1] for look in looks], run.parameters()
    )


def furthest(trained: list[Trained], reference: list[Trained]) -> float:
    """The largest difference of any parameter of any seed."""
    return max(
        distance(own.parameters, other.parameters)
        for own, other in zip(trained, reference, strict=True)
    )
