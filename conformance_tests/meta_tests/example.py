"""Runs the suite on the example backend as a third party would: by entry points, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parent / "example_backend"
ENTRY_POINTS = """
[gradaccum.backends]
plain = plain_backend:backend
[gradaccum.types]
plain = plain_backend:backend
[gradaccum.harnesses]
plain = {harness}
"""


def install(site: Path, harness: str = "plain_harness:harness") -> None:
    """Write what an installer would: a distribution's metadata with its entry points."""
    metadata = site / "plain-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: plain\nVersion: 1.0\n", encoding="utf-8")
    (metadata / "entry_points.txt").write_text(ENTRY_POINTS.format(harness=harness), encoding="utf-8")


def python_path(*folders: Path) -> str:
    """PYTHONPATH with `folders` before what is on it already."""
    return os.pathsep.join([*map(str, folders), *filter(None, [os.environ.get("PYTHONPATH")])])


def run_suite(site: Path, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """``python -m gradaccum_conformance --backend plain`` with the example on the path."""
    path = python_path(site, EXAMPLE, Path(__file__).parent)
    command = [sys.executable, "-m", "gradaccum_conformance", "--backend", "plain", "-q", "-p", "no:cacheprovider", *options]
    command += [] if "--xfails-file" in options else ["--xfails-file", str(EXAMPLE / "xfails.txt")]
    return subprocess.run(command, env={**os.environ, "PYTHONPATH": path, **environment}, capture_output=True, text=True, check=False)
