"""Run by two processes: models whose parameters are split over both, against one
process that has all micro-batches.
"""

from ..torch_fsdp import IMITATES_STREAMS, RUNS_ON_CPU
from . import layers, loop, refusals, sums, ways
from .common import CHECKS

_WAYS = {
    name
    for name, function in CHECKS.items()
    if function.__module__ == ways.__name__ and not name.startswith("half_precision")
}
EARLY = {"layers_of_copies", *(_WAYS if IMITATES_STREAMS else ())}
"""The checks that run on any torch, by imitated streams if need be. The others count
collectives by newer names, call newer methods, or have gloo average.
"""
RUNNABLE = {
    name: check for name, check in CHECKS.items() if RUNS_ON_CPU or name in EARLY
}

__all__ = ["CHECKS", "EARLY", "RUNNABLE", "layers", "loop", "refusals", "sums", "ways"]
