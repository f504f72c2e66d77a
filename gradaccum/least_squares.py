"""Least squares: find the coefficients that express a gradient as a weighted sum of the
micro-batches' gradients. The loop check and `verify` use these coefficients.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

Vector: TypeAlias = Any
"""A float64 vector of NumPy or torch, which supports ``+``, ``-``, ``* float`` and
``@``.
"""
PIVOT = 1e-12
"""The micro-batches' gradients count as different enough to be distinguished if every
pivot of their normalised Gram matrix is larger than this number.
"""


class SolvedUpdate(NamedTuple):
    """The gradient that an optimizer received, expressed as a weighted sum of the
    micro-batches' gradients.
    """

    coefficients: tuple[float, ...]
    """One coefficient per micro-batch. With several workers the coefficients of worker
    0 come first, then the coefficients of worker 1, and so on.
    """
    uncertainty: float
    """The rounding error of the coefficients, relative to the largest coefficient. It
    is inf if the micro-batches' gradients are too similar to be distinguished.
    """
    unexplained: float
    """||v - sum(c_k g_k)|| / sum(||c_k g_k||): how much of the received gradient v is
    not explained by the weighted sum of the micro-batches' gradients g_k, with the
    coefficients c_k.
    """
    norm: float
    """The 2-norm of the gradient that the optimizer received."""
    norms: tuple[float, ...] = ()
    """The 2-norm of each micro-batch's gradient."""


def dot(a: Vector, b: Vector) -> float:
    return float(a @ b)


def solve_updates(
    gradients: Sequence[Vector],
    updates: Sequence[Vector],
    product: Callable[[Vector, Vector], float] = dot,
) -> list[SolvedUpdate]:
    """For each update, find the weighted sum of the micro-batches' gradients that is
    closest to the gradient of the update.

    Args:
        gradients: the gradient of each micro-batch.
        updates: the gradients that the optimizer received.
        product: the dot product of two vectors, which defines what "closest" means.
    """
    gram = [[product(a, b) for b in gradients] for a in gradients]
    norms = [math.sqrt(row[place]) for place, row in enumerate(gram)]
    scales = [norm or 1.0 for norm in norms]
    elements = len(gradients[0])
    count = sum(norm > 0 for norm in norms)
    inverse = None
    if 0 < count < elements and all(map(math.isfinite, norms)):
        inverse = _inverse(
            [
                [
                    value / scale / other
                    for value, other in zip(row, scales, strict=True)
                ]
                for row, scale in zip(gram, scales, strict=True)
            ]
        )

    def solved(update: Vector) -> SolvedUpdate:
        norm = math.sqrt(product(update, update))
        if inverse is None or not math.isfinite(norm):
            unknown = (math.nan,) * len(norms)
            return SolvedUpdate(unknown, math.inf, 0.0, norm, tuple(norms))
        coefficients = [0.0] * len(norms)
        rest = update
        for _ in range(3):  # In exact arithmetic one pass would be enough.
            products = [
                product(gradient, rest) / scale
                for gradient, scale in zip(gradients, scales, strict=True)
            ]
            for k, row in enumerate(inverse):
                total = sum(a * b for a, b in zip(row, products, strict=True))
                coefficients[k] += total / scales[k]
            rest = update
            for coefficient, gradient in zip(coefficients, gradients, strict=True):
                rest = rest - gradient * coefficient
        residual = math.sqrt(product(rest, rest))
        total = sum(abs(c) * norm for c, norm in zip(coefficients, norms, strict=True))
        largest = max(map(abs, coefficients))
        # The largest standard error of a coefficient if the residual of each element
        # had the standard deviation 1.
        spread = max(
            math.sqrt(max(inverse[k][k], 0.0)) / norm
            for k, norm in enumerate(norms)
            if norm
        )
        error = 4 * residual / math.sqrt(elements - count) * spread
        return SolvedUpdate(
            tuple(coefficients),
            error / (largest or 1.0),
            residual / (total or 1.0),
            norm,
            tuple(norms),
        )

    return [solved(update) for update in updates]


def _inverse(matrix: list[list[float]]) -> list[list[float]] | None:
    """Invert a symmetric matrix in place, and return it. Return None if a pivot is
    almost zero. The diagonal elements of the matrix must be 1, except in rows that
    contain only zeros. In these rows the diagonal element is first set to 1.
    """
    for k, top in enumerate(matrix):
        if not any(top):
            top[k] = 1.0
        pivot = top[k]
        if pivot <= PIVOT:
            return None
        top[k] = 1.0
        top[:] = [value / pivot for value in top]
        for row in matrix:
            if row is not top:
                factor = row[k]
                row[k] = 0.0
                row[:] = [a - factor * b for a, b in zip(row, top, strict=True)]
    return matrix
