"""The executable specification: the semantics as a reader would write them down, in
NumPy.

It keeps every micro-batch of the open window in a list and computes everything from
that list at the end. It uses none of the core's transitions, so that a mistake in the
core shows as a difference. It is the backend called ``numpy``.
"""

from gradaccum_conformance.reference.accumulation import ReferenceAccumulation
from gradaccum_conformance.reference.backend import backend
from gradaccum_conformance.reference.optimizers import (
    Adam,
    Capture,
    NumpyOptimizer,
    Sgd,
)

__all__ = [
    "Adam",
    "Capture",
    "NumpyOptimizer",
    "ReferenceAccumulation",
    "Sgd",
    "backend",
]
