"""Run by two processes: what they compute together against one that has everything.
Each check has its own line in the report.
"""

from conformance_tests.framework_tests.mindspore_workers import (
    refusals,
    sharded,
    windows,
)
from conformance_tests.framework_tests.mindspore_workers.checks import CHECKS

__all__ = ["CHECKS", "refusals", "sharded", "windows"]
