"""Gradients typed ``unreduced``, on explicit meshes of four devices: refused by name, with the way out."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from conformance_tests.framework_tests.jax_versions import needs_shard_map

SCRIPT = Path(__file__).with_name("jax_explicit_mesh.py")
SECONDS = 300
"""A deadlock would last for ever; a check takes a few seconds."""

pytestmark = needs_shard_map


@pytest.mark.parametrize("check", ["gradients", "parameters", "added_up"])
def test_explicit_mesh(check: str) -> None:
    run = subprocess.run([sys.executable, "-W", "error", SCRIPT, check], capture_output=True, text=True, timeout=SECONDS, check=False)
    assert run.returncode == 0, run.stderr[-4000:]
