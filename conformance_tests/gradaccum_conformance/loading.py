"""Finds a backend's harness by name, through entry points, and imports nothing else."""

from __future__ import annotations

from functools import cache
from typing import cast

from gradaccum.registry import load
from gradaccum_conformance.harness import Harness

HARNESSES = "gradaccum.harnesses"


@cache
def load_harness(name: str) -> Harness:
    """The harness of the backend called `name`, the same one at every call.

    Raises:
        BackendNotFoundError: there is none, or its framework is not installed.
    """
    return cast(Harness, load(HARNESSES, name))
