"""Run by two processes: models whose parameters are split over both, against one process that has all micro-batches."""

from . import loop, refusals, sums, ways
from .common import CHECKS

EARLY = {name for name, function in CHECKS.items() if function.__module__ == ways.__name__ and not name.startswith("half_precision")}
"""The checks that run on imitated streams. The others count collectives by newer names, call newer methods, or have gloo average."""

__all__ = ["CHECKS", "EARLY", "loop", "refusals", "sums", "ways"]
