"""One of the two processes: ``python -m conformance_tests.framework_tests.torch_shards
RANK FOLDER``.
"""

from __future__ import annotations

import sys
from pathlib import Path

from conformance_tests.framework_tests.torch_fsdp import RUNS_ON_CPU, imitate_streams
from conformance_tests.framework_tests.torch_shards import CHECKS, EARLY
from conformance_tests.framework_tests.torch_workers.jobs import run_checks

if __name__ == "__main__":
    imitate_streams()
    run_checks(
        {name: run for name, run in CHECKS.items() if RUNS_ON_CPU or name in EARLY},
        int(sys.argv[1]),
        Path(sys.argv[2]),
    )
