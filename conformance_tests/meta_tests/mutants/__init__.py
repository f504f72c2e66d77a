"""Faults to plant in the example backend, one at a time, as data. The suite must catch
each.
"""

from __future__ import annotations

from .large_batch import LARGE_BATCH
from .window import WINDOW
from .workers import WORKERS

__all__ = ["MUTANTS", "PLACES"]

MUTANTS = {mutant.name: mutant for mutant in (*WINDOW, *WORKERS, *LARGE_BATCH)}
PLACES = (
    "plain_backend",
    "plain_large_batch",
    "gradaccum_conformance.reference.harness",
)
"""The modules in whose sources the faults stand."""
