"""Run by two processes: windows over both against one process that has all
micro-batches. Each check has its own line in the report.
"""

from . import (
    engines,
    loop_checks,
    overlapping,
    process_groups,
    random_programs,
    refusals,
    sharded,
    windows,
)
from .common import WORLD
from .jobs import CHECKS

__all__ = [
    "CHECKS",
    "WORLD",
    "engines",
    "loop_checks",
    "overlapping",
    "process_groups",
    "random_programs",
    "refusals",
    "sharded",
    "windows",
]
