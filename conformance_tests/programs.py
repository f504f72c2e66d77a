"""The repository, and programs that a test runs in a process of their own."""

import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def run_python(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run this Python with arguments; the result has its exit status and what it said.

    Options are those of `subprocess.run`.
    """
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, **options)
