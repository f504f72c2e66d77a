"""A loss that couples the items of a batch, with its gradient by hand: the truth for
calls that split such a batch.

It is a function of the outputs of all items, so the mean over micro-batches is another
loss.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from gradaccum_conformance.specs import Array

TEMPERATURE = 0.25
"""Where the loss's own parameter begins."""


class Coupled(NamedTuple):
    """A loss of all outputs and its gradient."""

    loss: float
    left: Array
    right: Array
    temperature: float
    """The gradient with respect to each."""


def mirrored(x: Array) -> Array:
    """The second view of each input: its last axis reversed."""
    view: Array = np.ascontiguousarray(x[..., ::-1])
    return view


def contrast(left: Array, right: Array, temperature: float) -> Coupled:
    """InfoNCE (van den Oord et al. 2018) with a learned temperature, as CLIP has it.

    The mean over rows of the cross-entropy of ``exp(temperature) * left @ right.T``
    with the diagonal as labels. `left` and `right` have one row per item.
    """
    items = len(left)
    scale = np.exp(temperature)
    scores = scale * left @ right.T
    shifted = scores - scores.max(1, keepdims=True)
    p = np.exp(shifted) / np.exp(shifted).sum(1, keepdims=True)
    loss = float(np.mean(np.log(np.exp(shifted).sum(1)) - np.diag(shifted)))
    ds = (p - np.eye(items)) / items
    return Coupled(
        loss, scale * ds @ right, scale * ds.T @ left, float((ds * scores).sum())
    )
