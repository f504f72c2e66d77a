"""A large batch that is sharded over eight devices, in one call: what each device
computes, each program in a process of its own.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("jax_batch_shards.py")
CHECKS = {
    "fair_share": "2, 4 and 8 devices, 2 to 16 steps, meshes of both kinds",
    "outside_of_jit": "sizes of equal shares, which the call knows",
    "uneven_under_jit": "items that devices and steps do not divide",
    "in_shardings": "a batch whose type names no mesh",
    "whole_batches": "one device, replicated batches and ``shard_map``: as ever",
    "neighbours": "pairs of items stay together",
    "nested_batches": "axes, keys, weights and rows",
    "window": "``value_and_update``",
    "layered": "``layered_value_and_update``",
    "coupled": "``coupled_value_and_grad``",
    "sizes": "``micro_batch_size``, an automatic one too",
}


@pytest.mark.parametrize("check", CHECKS)
def test_each_device_computes_its_share(check: str) -> None:
    command = [sys.executable, "-W", "error", str(SCRIPT), check]
    ran = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=600
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
