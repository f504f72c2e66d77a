"""Run by two processes: what they compute together against one that has everything. Each check has its own line in the report."""

from conformance_tests.framework_tests.mindspore_workers import start  # isort: skip  # its check is the first one
from conformance_tests.framework_tests.mindspore_workers import (
    cross_entropy,
    exact,
    modes,
    refusals,
    resuming,
    schedules,
    sharded,
    training,
)
from conformance_tests.framework_tests.mindspore_workers.checks import CHECKS

__all__ = ["CHECKS", "cross_entropy", "exact", "modes", "refusals", "resuming", "schedules", "sharded", "start", "training"]
