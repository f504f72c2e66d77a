"""Least squares: find the coefficients that express a gradient as a weighted sum of the
micro-batches' gradients. The loop check and `verify` use these coefficients.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

from gradaccum.options import Reduction

Vector: TypeAlias = Any
"""A float64 vector (a NumPy array or a torch tensor) that supports ``@``, ``+``, ``-``
and ``* float``.
"""
PIVOT = 1e-6
"""The gradients are too similar to distinguish if one of them differs from a weighted
sum of the earlier gradients by at most this fraction of its norm.
"""


class WeightedSum(NamedTuple):
    """A gradient, expressed as a weighted sum of the micro-batches' gradients."""

    coefficients: tuple[float, ...]
    """One coefficient per micro-batch. With several workers, the coefficients are
    ordered by worker: worker 0 comes first.
    """
    uncertainty: float
    """The estimated error of the coefficients, relative to the largest coefficient; inf
    if the micro-batches' gradients are too similar to distinguish.
    """
    unexplained: float
    """The fraction of the gradient v that the weighted sum does not explain, computed
    as ||v - sum(c_k g_k)|| / sum(||c_k g_k||). Here c_k is the coefficient of
    micro-batch k, and g_k its gradient.
    """
    norm: float
    """The 2-norm of the gradient."""
    norms: tuple[float, ...] = ()
    """The 2-norm of each micro-batch's gradient."""
    condition: float = 1.0
    """A condition number: the factor by which a relative error of the gradients may be
    magnified in the coefficients. It is 1 if the micro-batches' gradients are
    orthogonal, and larger if they are similar.
    """


def norm_of(vector: Vector) -> float:
    return math.sqrt(vector @ vector)


def right_factors(
    reduction: Reduction, weights: Sequence[float], large_weight: float = 1.0
) -> tuple[float, ...]:
    """Return one factor per micro-batch. The large batch's gradient is the sum of the
    micro-batches' gradients, each multiplied by its factor. `large_weight`, the weight
    of the large batch, is used only with the reduction "sum_per_item".
    """
    if reduction == "sum":
        return (1.0,) * len(weights)
    sizes = weights if reduction == "mean" else [large_weight] * len(weights)
    total = math.fsum(weights) or 1.0
    return tuple(size / total for size in sizes)


class GradientBasis:
    """Orthonormal vectors that span the micro-batches' gradients, computed by the
    modified Gram-Schmidt process. An all-zero gradient adds no vector.
    """

    def __init__(self, gradients: Sequence[Vector]) -> None:
        self.norms = tuple(norm_of(gradient) for gradient in gradients)
        self.directions: list[Vector] = []
        self.recipes: list[list[float]] = []
        """For each of the orthonormal vectors in `directions`, the coefficients that
        express the vector as a weighted sum of the micro-batches' gradients.
        """
        self.freedom = len(gradients[0]) - sum(norm != 0 for norm in self.norms)
        """The degrees of freedom of the residual: the number of elements of a gradient
        minus the number of gradients that are not all zero.
        """
        self.is_usable = any(self.norms) and self.freedom > 0
        for place, norm in enumerate(self.norms):
            if norm == 0:
                continue
            coefficients, remainder = self.project(gradients[place])
            pivot = norm_of(remainder)
            if not pivot > PIVOT * norm:
                self.is_usable = False
                return
            recipe = [-coefficient / pivot for coefficient in coefficients]
            recipe[place] = 1 / pivot
            self.recipes.append(recipe)
            self.directions.append(remainder * (1 / pivot))

    def project(self, vector: Vector) -> tuple[list[float], Vector]:
        """Approximate a vector by the nearest weighted sum of the gradients. Return the
        coefficients of this sum, and the remainder (the vector minus the sum).
        """
        coefficients = [0.0] * len(self.norms)
        for direction, recipe in zip(self.directions, self.recipes, strict=True):
            component = float(direction @ vector)
            vector = vector - direction * component
            for place, share in enumerate(recipe):
                coefficients[place] += component * share
        return coefficients, vector

    def weighted_sum(self, vector: Vector) -> WeightedSum:
        norm = norm_of(vector)
        if not self.is_usable or not math.isfinite(norm):
            unknown = (math.nan,) * len(self.norms)
            return WeightedSum(unknown, math.inf, 0.0, norm, self.norms)
        coefficients, remainder = self.project(vector)
        residual = norm_of(remainder)
        sizes = [abs(coefficient) for coefficient in coefficients]
        total = sum(size * norm for size, norm in zip(sizes, self.norms, strict=True))
        # The standard errors of the coefficients, assuming that the residual's elements
        # have a standard deviation of 1.
        spreads = [math.hypot(*shares) for shares in zip(*self.recipes, strict=True)]
        spread = max(spreads)
        error = 4 * residual / math.sqrt(self.freedom) * spread
        return WeightedSum(
            tuple(coefficients),
            error / (max(sizes) or 1.0),
            residual / (total or 1.0),
            norm,
            self.norms,
            max(map(operator.mul, spreads, self.norms)),
        )
