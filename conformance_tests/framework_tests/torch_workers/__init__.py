"""Run by two processes: windows over both against one process that has all
micro-batches. Each check has its own line in the report.
"""

from . import (
    auto_size,
    engines,
    loop_checks,
    overlapping,
    process_groups,
    random_programs,
    refusals,
    windows,
)
from .jobs import CHECKS

__all__ = [
    "CHECKS",
    "auto_size",
    "engines",
    "loop_checks",
    "overlapping",
    "process_groups",
    "random_programs",
    "refusals",
    "windows",
]
