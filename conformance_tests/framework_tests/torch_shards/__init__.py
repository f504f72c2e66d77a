"""Run by two processes: models whose parameters are split over both, against one process that has all micro-batches."""

from conformance_tests.framework_tests.torch_shards import checkpoints, loop, refusals, sums, ways, whole
from conformance_tests.framework_tests.torch_shards.common import CHECKS

__all__ = ["CHECKS", "checkpoints", "loop", "refusals", "sums", "ways", "whole"]
