"""A program on four devices: a large batch that is sharded over a mesh, cut under
`jax.jit`. Each device should compute its own items, and gather nothing.

    python jax_sharded_batch.py contiguous    # or: strided

The tests run it in a process of its own, since JAX fixes the number of devices when it
starts.
"""

from __future__ import annotations

import os
import re
import sys

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
os.environ["JAX_PLATFORMS"] = "cpu"

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import gradaccum_jax

DEVICES, ITEMS, WIDTH, STEPS = 4, 1024, 32, 4
MESH = Mesh(np.array(jax.devices()), ("data",))


def loss_fn(params: Any, x: Any) -> Any:
    return jnp.mean(jnp.tanh(x @ params["w"]) ** 2)


def strided(x: Any, steps: int) -> list[Any]:
    """Micro-batch number i has the rows i, i + steps, ...: some of each device."""
    parts = x.reshape(-1, steps, *x.shape[1:]).swapaxes(0, 1)
    spread = NamedSharding(MESH, PartitionSpec(None, "data"))
    return list(jax.lax.with_sharding_constraint(parts, spread))


SPLITS = {"contiguous": None, "strided": strided}


def check(split: str) -> None:
    rng = np.random.default_rng(0)
    params = {"w": jnp.asarray(rng.normal(size=(WIDTH, WIDTH)), jnp.float32)}
    rows = rng.normal(size=(ITEMS, WIDTH)).astype(np.float32)
    x = jax.device_put(rows, NamedSharding(MESH, PartitionSpec("data")))
    call = gradaccum_jax.value_and_grad(loss_fn, steps=STEPS, split=SPLITS[split])
    compiled = jax.jit(call).lower(params, x).compile()
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6),
        compiled(params, x),
        jax.value_and_grad(loss_fn)(params, rows),
    )
    text = compiled.as_text()
    products = re.findall(rf"f32\[(\d+),{WIDTH}\]\S* (?:dot|custom-call)\(", text)
    gathers = re.findall(r" all-gather(?:-start)?\(", text)
    reductions = re.findall(r" all-reduce(?:-start)?\(", text)
    most = max(map(int, products))
    print(f"{most} rows, {len(gathers)} gathers, {len(reductions)} reductions")
    assert most == ITEMS // STEPS // DEVICES, "every device computes all rows"
    assert not gathers, "the batch is gathered"
    assert reductions


if __name__ == "__main__":
    check(sys.argv[1])
