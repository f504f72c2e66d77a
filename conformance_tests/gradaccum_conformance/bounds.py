"""Bounds on the distance of a computed gradient from the true one: derived from the
arithmetic, never picked by hand.

A sum of n terms, each rounded once, in an arithmetic with unit roundoff u is off by at
most gamma(n) = n u / (1 - n u) times the sum of the absolute terms (Higham, "Accuracy
and Stability of Numerical Algorithms", 2nd ed., section 3.1). Errors are measured in
the 2-norm, relative to the truth, for each parameter apart, so that a wrong small
parameter cannot hide behind a large one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.linalg import norm

from gradaccum_conformance.harness import Dtype
from gradaccum_conformance.specs import Array, Conv, Dense, Model

FLOAT64_RELATIVE = 1e-13
"""The relative error that the suite allows in float64, whatever the derived bound."""


def unit_roundoff(dtype: Dtype) -> float:
    """2^-53 for float64, 2^-24 for float32, 2^-11 for float16, 2^-8 for bfloat16: half
    the distance of 1 to the next number.
    """
    return {
        "float64": 2.0**-53,
        "float32": 2.0**-24,
        "float16": 2.0**-11,
        "bfloat16": 2.0**-8,
    }[dtype]


def gamma(additions: int, dtype: Dtype) -> float:
    """The relative error bound of a sum of so many rounded operations."""
    rounding = additions * unit_roundoff(dtype)
    return rounding / (1 - rounding)


def additions_in_gradient(model: Model, items: int, micro_batches: int) -> int:
    """The number of rounded operations behind one gradient element: the inner products
    of every layer, forward and backward, the sum over the items and positions, and the
    sum over the micro-batches with its weighting and division.
    """
    inner = 0
    for layer in model.layers:
        if isinstance(layer, Dense):
            inner += layer.n_in + layer.n_out
        elif isinstance(layer, Conv):
            inner += layer.c_in * layer.size**2 + layer.c_out * layer.size**2
        else:
            inner += 4
    positions = int(np.prod(model.input_shape[1:])) if len(model.input_shape) > 1 else 1
    return inner + items * positions + 3 * micro_batches


def bound_of_sum(terms: Sequence[Mapping[str, Array]], dtype: Dtype) -> float:
    """How far sum(terms) / d may be off, relative to the truth, for the worst
    parameter.

    gamma(n) is relative to the sum of the absolute terms (Higham, section 4.2). Where
    terms cancel, the truth is smaller than that sum and the bound relative to the truth
    is larger. Three roundings beside the additions: the weight, the divisor and the
    division.
    """
    condition = 1.0
    for name in terms[0]:
        total = norm(np.sum([term[name] for term in terms], axis=0))
        absolute = norm(np.sum([np.abs(term[name]) for term in terms], axis=0))
        condition = max(condition, float(absolute / total) if total else 1.0)
    return condition * gamma(len(terms) + 3, dtype)


def relative_errors(
    measured: Mapping[str, Array], truth: Mapping[str, Array]
) -> dict[str, float]:
    """2-norm of the difference over 2-norm of the truth, by parameter; against a truth
    of zero, the norm itself.
    """
    errors = {}
    for name, true in truth.items():
        difference = norm(np.asarray(measured[name], np.float64) - true)
        size = float(norm(true))
        errors[name] = float(difference) / (size or 1.0)
    return errors


def worst(measured: Mapping[str, Array], truth: Mapping[str, Array]) -> float:
    """The largest of `relative_errors`; NaN and missing parameters count as inf."""
    if set(measured) != set(truth):
        return float("inf")
    return max(
        error if error == error else float("inf")
        for error in relative_errors(measured, truth).values()
    )
