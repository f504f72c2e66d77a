"""Trains one framework in all four ways, and measures after each epoch the distance
from the large-batch run.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from gradaccum_conformance.demo.batches import Digits, large_batches
from gradaccum_conformance.demo.recipes import LARGE, RECIPES, STEPS, Recipe
from gradaccum_conformance.harness import Harness, Session, Setup
from gradaccum_conformance.specs import LENET, Array, Arrays, Optimizer, make_weights

EPOCHS = 12
OPTIMIZER = Optimizer("momentum", learning_rate=0.2)
COMPILED = ("graph", "jit")
"""Modes that are preferred, in this order, to a harness's default: thousands of steps
repay the compilation.
"""


class Measured(NamedTuple):
    """One run after one epoch."""

    run: str
    epoch: int
    """From 1."""
    loss: float
    """Mean cross-entropy over the training items."""
    accuracy: float
    """On the test items, in [0, 1]."""
    difference: float
    """The largest absolute difference of any parameter to the large-batch run's after
    the same epoch.
    """


def train(harness: Harness, digits: Digits, epochs: int = EPOCHS) -> Iterator[Measured]:
    """All four runs, one after another, from the same weights; one item for each epoch
    of each.
    """
    x, y = digits.test
    large = []
    for recipe in RECIPES:
        session = _start(harness, recipe)
        for epoch in range(1, epochs + 1):
            recipe.epoch(harness, session, large_batches(digits.train, epoch))
            parameters = session.parameters()
            if recipe is LARGE:
                large.append(parameters)
            yield Measured(
                recipe.name,
                epoch,
                cross_entropy(session.predict(digits.train.x), digits.train.y),
                float(np.mean(session.predict(x).argmax(axis=1) == y)),
                largest_difference(parameters, large[epoch - 1]),
            )


def largest_difference(a: Arrays, b: Arrays) -> float:
    """The largest absolute difference between two sets of parameters of the same names;
    NaN if any value is.
    """
    differences = [np.abs(a[name].astype(np.float64) - b[name]).max() for name in b]
    return float(np.max(differences))


def cross_entropy(logits: Array, labels: Array) -> float:
    """Mean softmax cross-entropy in float64; logits (items, classes), labels
    (items,).
    """
    shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    log_sum = np.log(np.exp(shifted).sum(axis=1))
    return float(np.mean(log_sum - shifted[np.arange(len(labels)), labels]))


def _start(harness: Harness, recipe: Recipe) -> Session:
    options = {"steps": STEPS} if recipe.wrapped else None
    mode = next((mode for mode in COMPILED if mode in harness.modes), harness.modes[0])
    weights = make_weights(LENET)
    return harness.start(Setup(LENET, weights, OPTIMIZER, mode=mode, options=options))
