"""Starts the processes of a job, and leaves none behind."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from conformance_tests.framework_tests.torch_workers.common import WORLD

ROOT = Path(__file__).parents[3]
SECONDS = 500
"""A loaded machine took 240 for jobs of two workers that need 60."""


def run_workers(module: str, *arguments: str, folder: Path, workers: int = WORLD) -> list[int]:
    """Run ``python -m module ARGUMENTS RANK FOLDER`` once per worker; returns the exit codes, by rank."""
    command = [sys.executable, "-m", module, *arguments]
    running: list[subprocess.Popen[bytes]] = []
    try:
        running += [subprocess.Popen([*command, str(rank), str(folder)], cwd=ROOT) for rank in range(workers)]
        return [process.wait(timeout=SECONDS) for process in running]
    finally:
        for process in running:
            process.kill()
            process.wait()
