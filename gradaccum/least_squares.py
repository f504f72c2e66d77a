"""Least squares: find the coefficients that express a gradient as a weighted sum of the
micro-batches' gradients. The loop check and `verify` use these coefficients.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

PIVOT = 1e-12
"""Gradients count as distinguishable if each pivot of their normalised Gram matrix is
larger than this number.
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
    """The rounding error of the coefficients, relative to the largest coefficient; inf
    if the micro-batches' gradients are too similar to distinguish.
    """
    unexplained: float
    """||v - sum(c_k g_k)|| / sum(||c_k g_k||): how much of the received gradient v is
    not a sum of the micro-batches' gradients g_k with the coefficients c_k.
    """
    norm: float
    """The 2-norm of the gradient that the optimizer received."""
    norms: tuple[float, ...] = ()
    """The 2-norm of each micro-batch's gradient."""


def solve_update(gradients: Any, update: Any) -> SolvedUpdate:
    """Return the weighted sum of the micro-batches' gradients that is nearest to the
    gradient that the optimizer received.

    Args:
        gradients: a float64 array of NumPy or torch, one row per micro-batch, shape
            (micro-batches, elements).
        update: the gradient that the optimizer received, shape (elements,).
    """

    def rest_of(coefficients: Sequence[float]) -> tuple[list[float], float]:
        residual = update
        for coefficient, gradient in zip(coefficients, gradients, strict=True):
            residual = residual - coefficient * gradient
        return (gradients @ residual).tolist(), math.sqrt(float(residual @ residual))

    gram = (gradients @ gradients.T).tolist()
    return solve_coefficients(gram, rest_of, gradients.shape[1])


def solve_coefficients(
    gram: Sequence[Sequence[float]],
    rest_of: Callable[[Sequence[float]], tuple[Sequence[float], float]],
    elements: int,
) -> SolvedUpdate:
    """Return the coefficients c_k for which sum(c_k g_k) is nearest to a vector v.

    Args:
        gram: the dot products of the g_k with each other.
        rest_of: takes the coefficients, and returns the dot products of the g_k with
            the residual v - sum(c_k g_k), and the norm of the residual.
        elements: the number of elements of v.
    """
    places = range(len(gram))
    coefficients = [0.0] * len(gram)
    products, norm = rest_of(coefficients)
    norms = [math.sqrt(max(gram[k][k], 0.0)) for k in places]
    count = sum(size > 0 for size in norms)
    scales = [size or 1.0 for size in norms]
    inverse = None
    if 0 < count < elements and all(map(math.isfinite, [*norms, norm])):
        inverse = _inverse(
            [[gram[j][k] / scales[j] / scales[k] for k in places] for j in places]
        )
    if inverse is None:
        unknown = (math.nan,) * len(gram)
        return SolvedUpdate(unknown, math.inf, 0.0, norm, tuple(norms))
    residual = norm
    for _ in range(3):  # In exact arithmetic one pass would be enough.
        scaled_products = [products[k] / scales[k] for k in places]
        for k in places:
            pairs = zip(inverse[k], scaled_products, strict=True)
            coefficients[k] += math.fsum(a * b for a, b in pairs) / scales[k]
        products, residual = rest_of(coefficients)
    total = sum(abs(c) * size for c, size in zip(coefficients, norms, strict=True))
    largest = max(map(abs, coefficients))
    # The standard error of least squares for a residual of 1 per element.
    spread = max(
        math.sqrt(max(inverse[k][k], 0.0)) / norms[k] for k in places if norms[k]
    )
    error = 4 * residual / math.sqrt(elements - count) * spread
    return SolvedUpdate(
        tuple(coefficients),
        error / (largest or 1.0),
        residual / (total or 1.0),
        norm,
        tuple(norms),
    )


def _inverse(matrix: list[list[float]]) -> list[list[float]] | None:
    """Invert a symmetric matrix with ones on its diagonal in place, and return it; None
    if a pivot is almost zero. If a row is all zeros, its diagonal element becomes 1.
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


def rounding_limit(epsilon: float) -> float:
    """Return the largest `SolvedUpdate.unexplained` that rounding alone can cause if
    `epsilon` is the machine epsilon. The limit is at least 1e-6, because a float64
    model may compute its loss in float32.
    """
    return max(16 * epsilon, math.pow(epsilon, 0.6), 1e-6)
