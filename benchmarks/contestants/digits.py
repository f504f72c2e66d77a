"""The data of the quality question: scikit-learn's bundled digits, cut into windows
whose last one of an epoch is short.

E. Alpaydin and C. Kaynak, "Optical Recognition of Handwritten Digits", UCI Machine
Learning Repository, 1998: 1797 images of 8 x 8, ten classes. The network is two dense
layers with a ReLU between them; how well it does is computed here, in NumPy, for
whoever trained it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

Array = NDArray[np.float32]
Labels = NDArray[np.int64]
Parameters = list[Array]
"""Weights and biases by turns: (64, 64), (64,), (64, 10), (10,)."""
Batch = tuple[Array, Labels]
Window = list[Batch]

STEPS = 4
MICRO_BATCH = 16
TEST_ITEMS = 361
"""Leaves 1436 to train on: 22 windows of 4 x 16, and a tail of 16 + 12."""
LEARNING_RATE = 0.05
MOMENTUM = 0.9


class Digits(NamedTuple):
    """Pixels in units of their deviation, shape (items, 64), and labels, shape
    (items,).
    """

    train: Batch
    test: Batch


def load() -> Digits:
    """One fixed split, each class in the same proportion in both parts."""
    pixels, labels = load_digits(return_X_y=True)
    train, test, train_labels, test_labels = train_test_split(
        pixels, labels, test_size=TEST_ITEMS, stratify=labels, random_state=0
    )
    mean, deviation = train.mean(), train.std()
    standard = [
        ((part - mean) / deviation).astype(np.float32) for part in (train, test)
    ]
    return Digits(
        (standard[0], train_labels.astype(np.int64)),
        (standard[1], test_labels.astype(np.int64)),
    )


def windows(train: Batch, seed: int, epoch: int) -> Iterator[Window]:
    """The micro-batches of one epoch in an order drawn anew, `STEPS` at a time; nothing
    is dropped.
    """
    order = np.random.default_rng([seed, epoch]).permutation(len(train[1]))
    starts = range(0, len(order), MICRO_BATCH)
    parts = [
        (
            train[0][order[start : start + MICRO_BATCH]],
            train[1][order[start : start + MICRO_BATCH]],
        )
        for start in starts
    ]
    return (parts[first : first + STEPS] for first in range(0, len(parts), STEPS))


def whole(window: Window) -> Batch:
    """A window as the one large batch that it stands for."""
    return np.concatenate([x for x, _ in window]), np.concatenate(
        [y for _, y in window]
    )


def first_parameters(seed: int, hidden: int = 64) -> Parameters:
    """He's normal distribution for the weights (K. He et al., "Delving Deep into
    Rectifiers", 2015), zero biases.
    """
    random = np.random.default_rng(seed)
    shapes = ((64, hidden), (hidden, 10))
    weights = [
        (random.standard_normal(shape) * np.sqrt(2 / shape[0])).astype(np.float32)
        for shape in shapes
    ]
    return [
        weights[0],
        np.zeros(hidden, np.float32),
        weights[1],
        np.zeros(10, np.float32),
    ]


def held_out(parameters: Parameters, test: Batch) -> tuple[float, float]:
    """(accuracy in [0, 1], mean cross-entropy in nats), in float64."""
    w1, b1, w2, b2 = (np.asarray(parameter, np.float64) for parameter in parameters)
    logits = np.maximum(test[0] @ w1 + b1, 0) @ w2 + b2
    logits -= logits.max(axis=1, keepdims=True)
    loss = np.log(np.exp(logits).sum(axis=1)) - logits[np.arange(len(logits)), test[1]]
    return float(np.mean(logits.argmax(axis=1) == test[1])), float(loss.mean())


def distance(a: Parameters, b: Parameters) -> float:
    """The largest absolute difference of any parameter."""
    return max(
        float(np.abs(np.asarray(x, np.float64) - y).max())
        for x, y in zip(a, b, strict=True)
    )
