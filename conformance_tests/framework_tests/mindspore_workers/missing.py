"""A worker that never comes to a window's end: the other one's error names the rank and
its window.
"""

from __future__ import annotations

import time
from pathlib import Path

from mindspore.communication import get_rank, init

import gradaccum
from conformance_tests.framework_tests.mindspore_workers.common import (
    Worker,
    micro_batches,
)
from conformance_tests.framework_tests.refusing import refused

RAISED = Path("raised")
SECONDS = 100

if __name__ == "__main__":
    init()
    rank = get_rank()
    worker, batches = Worker(steps=2), micro_batches(rank)
    worker.learn(batches[0])
    if rank == 0:
        with refused(gradaccum.UsageError, "rank 0", "2 micro-batches", "flush()"):
            worker.learn(batches[1])
        RAISED.touch()
    else:
        begin = time.monotonic()
        while not RAISED.exists() and time.monotonic() < begin + SECONDS:
            time.sleep(0.5)
        assert RAISED.exists()
