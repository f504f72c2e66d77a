"""All frameworks in one process, imported in any order: each wraps its own optimizer
and takes a dtype by name.
"""

from __future__ import annotations

import subprocess
import sys
from itertools import permutations

import pytest

OPTIMIZERS = {
    "torch": "torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)",
    "optax": "optax.sgd(0.1)",
    "mindspore": (
        "mindspore.nn.SGD([mindspore.Parameter(mindspore.Tensor([1.0, 1.0]),"
        " name='w')])"
    ),
}


ORDERS = list(permutations(OPTIMIZERS))


@pytest.mark.deep
@pytest.mark.parametrize("order", ORDERS, ids="-".join)
def test_frameworks_import_in_any_order(order: tuple[str, ...]) -> None:
    for package in order:
        pytest.importorskip(package, reason=f"{package} is not installed")
    lines = ["import gradaccum", *(f"import {package}" for package in order)]
    for dtype in ("float32", "bfloat16"):
        lines += [
            f"print(type(gradaccum.wrap({OPTIMIZERS[package]}, steps=4,"
            f" accumulate_dtype={dtype!r})))"
            for package in order
        ]
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert len(done.stdout.splitlines()) == 2 * len(order)
