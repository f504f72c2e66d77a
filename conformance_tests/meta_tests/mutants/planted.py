"""The example's harness after a fault was planted in its backend."""

from __future__ import annotations

import os

import plain_backend
from plain_harness import harness

from . import MUTANTS

__all__ = ["harness"]

MUTANTS[os.environ["MUTANT"]](plain_backend)
