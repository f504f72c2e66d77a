"""Faults to plant in the example backend, one at a time. The suite must catch each.

`planted` is the example's harness after one was planted: that which the environment
variable ``MUTANT`` names. The suite's workers load it too, each in its process.
"""

from __future__ import annotations

from . import counters, decisions, doors, knowledge, large_batch, scale, sums, workers
from .planting import MUTANTS, SELECTED

__all__ = [
    "MUTANTS",
    "SELECTED",
    "counters",
    "decisions",
    "doors",
    "knowledge",
    "large_batch",
    "scale",
    "sums",
    "workers",
]
