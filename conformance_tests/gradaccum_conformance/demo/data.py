"""The data: the 1797 handwritten digits that come with scikit-learn.

E. Alpaydin and C. Kaynak, "Optical Recognition of Handwritten Digits", UCI Machine
Learning Repository, 1998: 8 x 8 images, ten classes.
"""

from __future__ import annotations

import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from gradaccum_conformance.demo.batches import Digits
from gradaccum_conformance.specs import Array, Batch

TEST_ITEMS = 361
"""Leaves 1436 to train on, 22 large batches of 64 and a tail of 28: 4 x 7, or 16 + 12.
"""
SPLIT_SEED = 3


def load() -> Digits:
    """The digits under one fixed split, each class in the same proportion in both
    parts.
    """
    pixels, labels = load_digits(return_X_y=True)
    parts = train_test_split(
        pixels, labels, test_size=TEST_ITEMS, stratify=labels, random_state=SPLIT_SEED
    )
    train, test, train_labels, test_labels = parts
    mean = train.mean()
    deviation = train.std()
    return Digits(
        _batch((train - mean) / deviation, train_labels),
        _batch((test - mean) / deviation, test_labels),
    )


def _batch(pixels: Array, labels: Array) -> Batch:
    images = pixels.reshape(-1, 1, 8, 8).astype(np.float32).astype(np.float64)
    return Batch(images, labels.astype(np.int64))
