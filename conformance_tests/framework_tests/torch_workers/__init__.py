"""Run by two processes: windows over both against one process that has all micro-batches. Each check has its own line in the report."""

from conformance_tests.framework_tests.torch_workers import engines, process_groups, refusals, sharded, windows
from conformance_tests.framework_tests.torch_workers.common import WORLD
from conformance_tests.framework_tests.torch_workers.jobs import CHECKS

__all__ = ["CHECKS", "WORLD", "engines", "process_groups", "refusals", "sharded", "windows"]
