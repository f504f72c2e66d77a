"""``python -m gradaccum_conformance --backend NAME [--xfails-file FILE] [--results
FILE] [--deep] [pytest's own options]``.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

SUITE = Path(__file__).parent / "suite"


def main() -> int:
    """Run the suite in this process; the exit code is pytest's."""
    options = [
        "-p",
        "gradaccum_conformance.plugin",
        "--strict-markers",
        "-o",
        "xfail_strict=true",
        "-o",
        "addopts=",
    ]
    return int(
        pytest.main([str(SUITE), *options, "--import-mode=importlib", *sys.argv[1:]])
    )


if __name__ == "__main__":
    sys.exit(main())
