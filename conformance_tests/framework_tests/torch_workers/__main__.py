"""One of the two processes: ``python -m conformance_tests.framework_tests.torch_workers
JOB RANK FOLDER``.
"""

from __future__ import annotations

import sys
from pathlib import Path

from conformance_tests.framework_tests import torch_shards, torch_workers
from conformance_tests.framework_tests.torch_fsdp import imitate_streams
from conformance_tests.framework_tests.torch_workers.jobs import run_checks

if __name__ == "__main__":
    job, rank, folder = sys.argv[1:]
    checks = torch_workers.CHECKS
    if job == "torch_shards":
        imitate_streams()
        checks = torch_shards.RUNNABLE
    run_checks(checks, int(rank), Path(folder))
