"""Run by two processes: windows over both against one process that has all micro-batches. Each check has its own line in the report."""

from conformance_tests.framework_tests.torch_workers import (
    checkpoints,
    class_sharded,
    engines,
    exact,
    large_batches,
    process_groups,
    reductions,
    refusals,
    schedules,
    sharded_losses,
    taken_windows,
)
from conformance_tests.framework_tests.torch_workers.checks import CHECKS
from conformance_tests.framework_tests.torch_workers.common import WORLD

__all__ = [
    "CHECKS",
    "WORLD",
    "checkpoints",
    "class_sharded",
    "engines",
    "exact",
    "large_batches",
    "process_groups",
    "reductions",
    "refusals",
    "schedules",
    "sharded_losses",
    "taken_windows",
]
