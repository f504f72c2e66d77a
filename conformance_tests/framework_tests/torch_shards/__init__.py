"""Run by two processes: models whose parameters are split over both, against one process that has all micro-batches."""

from conformance_tests.framework_tests.torch_shards import checkpoints, large, loop, refusals, sums, ways, whole
from conformance_tests.framework_tests.torch_shards.common import CHECKS

__all__ = ["CHECKS", "checkpoints", "large", "loop", "refusals", "sums", "ways", "whole"]
