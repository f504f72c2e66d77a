"""One of the two processes: ``python -m conformance_tests.framework_tests.torch_workers
RANK FOLDER``.
"""

from __future__ import annotations

import sys
from pathlib import Path

from conformance_tests.framework_tests.torch_workers import CHECKS
from conformance_tests.framework_tests.torch_workers.jobs import run_checks

if __name__ == "__main__":
    run_checks(CHECKS, int(sys.argv[1]), Path(sys.argv[2]))
