"""Faults to plant in the adapters, as data: what stands in the sources, what stands
there instead, and the test that must fail then.

A mutant names no file. Its text stands once in the sources of its adapter, so that a
move of code costs nothing.
"""

from __future__ import annotations

from .planting import Mutant
from .to_jax import MUTANTS as JAX
from .to_mindspore import MUTANTS as MINDSPORE
from .to_torch import MUTANTS as TORCH

__all__ = ["ADAPTERS", "Mutant"]

ADAPTERS = {"torch": TORCH, "jax": JAX, "mindspore": MINDSPORE}
