"""The repository, its programs in pages, and programs in a process of their own."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PYTHON_BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
"""A program in a page."""


def run_python(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run this Python with arguments; the result has its exit status and what it said.

    Options are those of `subprocess.run`.
    """
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, **options)
