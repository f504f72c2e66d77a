"""An inner optimizer that reduces over devices: all devices end a window alike, and options that each would apply alone are refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("optax", reason="optax is not installed")
import jax
import jax.numpy as jnp
import optax

import gradaccum

SCRIPT = Path(__file__).parent / "jax_two_devices.py"
SECONDS = 300
"""The script takes a few seconds. A deadlock would last for ever."""


@pytest.mark.parametrize("lift", ["pmap", "shard_map"])
def test_inf_on_one_device_skips_everywhere(lift: str) -> None:
    run = subprocess.run([sys.executable, SCRIPT, lift], capture_output=True, text=True, timeout=SECONDS, check=False)
    assert run.returncode == 0, run.stderr[-2000:]


@pytest.mark.parametrize(
    ("options", "weight"),
    [({"clip_norm": 1.0}, None), ({"skip_norm": 1.0}, None), ({"on_overflow": "drop_micro_batch"}, None), ({}, 2.0)],
    ids=["clip_norm", "skip_norm", "on_overflow", "weight"],
)
@pytest.mark.parametrize("steps", [1, None])
def test_per_device_options_are_refused(options: dict[str, Any], weight: Any, steps: Any) -> None:
    """Each device would clip, skip, drop or weigh its own gradient, before the inner optimizer reduces them."""

    def update(gradients: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        return jax.lax.pmean(gradients, "devices"), state

    inner = optax.GradientTransformation(lambda params: optax.EmptyState(), update)
    tx = gradaccum.wrap(inner, steps=steps, **options)
    params = jnp.ones((2, 3))
    name = next(iter(options), "weight")
    with pytest.raises(gradaccum.UsageError, match=rf"^{name}: .*reduces over \['devices'\].*before tx\.update"):
        jax.vmap(lambda g, s: tx.update(g, s, weight=weight), axis_name="devices")(params, jax.vmap(tx.init)(params))
