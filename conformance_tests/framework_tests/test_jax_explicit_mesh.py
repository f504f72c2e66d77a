"""Gradients typed ``unreduced``, on explicit meshes of four devices: taken in as they are, and reduced once per window."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("optax", reason="optax is not installed")
import jax

from conformance_tests.framework_tests.jax_versions import needs_shard_map

SCRIPT = Path(__file__).with_name("jax_explicit_mesh.py")
SECONDS = 300
"""A deadlock would last for ever; a check takes a few seconds."""
CHECKS = ["scan", "streaming", "two_axes", "norm_and_overflow", "reduced_parameters", "mixed", "no_mesh_set", "refused"]

pytestmark = needs_shard_map


@pytest.mark.parametrize("check", CHECKS if jax.__version_info__ >= (0, 10) else ["too_old"])
def test_explicit_mesh(check: str) -> None:
    run = subprocess.run([sys.executable, "-W", "error", SCRIPT, check], capture_output=True, text=True, timeout=SECONDS, check=False)
    assert run.returncode == 0, run.stderr[-4000:]
