"""Losses that couple the items of a batch, with their gradients by hand: the truth for
calls that split such a batch.

Each is a function of the outputs of all items, so the mean over micro-batches is
another loss. `left` and `right` have one row per item.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import numpy as np

from gradaccum_conformance.specs import Array

Coupling = Literal["contrast", "covariance", "balance"]
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
    with the diagonal as labels.
    """
    items, scale = len(left), np.exp(temperature)
    scores = scale * left @ right.T
    shifted = scores - scores.max(1, keepdims=True)
    p = np.exp(shifted) / np.exp(shifted).sum(1, keepdims=True)
    loss = float(np.mean(np.log(np.exp(shifted).sum(1)) - np.diag(shifted)))
    ds = (p - np.eye(items)) / items
    return Coupled(
        loss, scale * ds @ right, scale * ds.T @ left, float((ds * scores).sum())
    )


def covariance(left: Array, right: Array, temperature: float) -> Coupled:
    """The covariance term of VICReg (Bardes et al. 2022) of `left`, times
    ``exp(temperature)``; `right` does not count.

    The sum of the squared entries off the diagonal of the covariance matrix, divided by
    the number of columns.
    """
    items, columns = left.shape
    centred = left - left.mean(0)
    c = centred.T @ centred / (items - 1)
    off = c - np.diag(np.diag(c))
    loss = float(np.exp(temperature) * (off**2).sum() / columns)
    gradient = np.exp(temperature) * 4 * centred @ off / (columns * (items - 1))
    return Coupled(loss, gradient, np.zeros_like(right), loss)


def balance(left: Array, right: Array, temperature: float) -> Coupled:
    """The load balance of a mixture of experts (Fedus et al. 2021, equation 4) over the
    batch, times ``exp(temperature)``.

    ``experts * sum(fraction of items whose largest entry is there * mean probability
    there)``; `right` does not count, and the fraction has no gradient.
    """
    items, experts = left.shape
    e = np.exp(left - left.max(1, keepdims=True))
    p = e / e.sum(1, keepdims=True)
    fraction = np.bincount(left.argmax(1), minlength=experts) / items
    factor = np.exp(temperature) * experts
    loss = float(factor * (fraction * p.mean(0)).sum())
    dp = np.broadcast_to(factor * fraction / items, p.shape)
    return Coupled(
        loss, p * (dp - (dp * p).sum(1, keepdims=True)), np.zeros_like(right), loss
    )


COUPLINGS: dict[Coupling, Callable[[Array, Array, float], Coupled]] = {
    "contrast": contrast,
    "covariance": covariance,
    "balance": balance,
}
