"""Faults to plant in the example backend, one at a time. The suite must catch each.

As a pytest plugin (``-p mutants``) it plants the fault that the environment variable ``MUTANT`` names.
"""

from __future__ import annotations

import os

from . import counters, decisions, doors, scale, sums
from .planting import MUTANTS

__all__ = ["MUTANTS", "counters", "decisions", "doors", "scale", "sums"]


def pytest_configure() -> None:
    import plain_backend

    MUTANTS[os.environ["MUTANT"]](plain_backend)
