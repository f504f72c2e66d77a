"""A large batch that is sharded over four devices, in one call under `jax.jit`: what each
device computes, in a process of its own.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("jax_sharded_batch.py")
UNFAIR = "every device computes all rows"


@pytest.mark.every_mode
@pytest.mark.parametrize("split", ["strided", "contiguous"])
def test_each_device_computes_its_share(split: str) -> None:
    """A quarter of each micro-batch's rows, without a gather: by a strided ``split=``,
    and by itself.
    """
    command = [sys.executable, "-W", "error", str(SCRIPT), split]
    ran = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=300
    )
    assert UNFAIR not in ran.stderr, ran.stdout
    if ran.returncode:
        raise RuntimeError(ran.stderr[-3000:])
