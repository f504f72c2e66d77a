"""Finds a backend's harness by name, and imports nothing else."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import cast

from gradaccum.registry import load, load_backend
from gradaccum_conformance.harness import Harness

MODULES = {
    "jax": "gradaccum_harnesses.jax",
    "mindspore": "gradaccum_harnesses.mindspore",
    "numpy": "gradaccum_conformance.reference.harness",
    "torch": "gradaccum_harnesses.torch",
}
"""The modules of the harnesses that come with the suite."""
HARNESSES = "gradaccum.harnesses"
"""The group of entry points in which other packages register a harness."""


@cache
def load_harness(name: str) -> Harness:
    """The harness of the backend called `name`, the same one at every call.

    Raises:
        BackendNotFoundError: there is none, or its framework is not installed.
    """
    if name in MODULES:
        load_backend(name)
        return cast(Harness, import_module(MODULES[name]).harness)
    return cast(Harness, load(HARNESSES, name))
