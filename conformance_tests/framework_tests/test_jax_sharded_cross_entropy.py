"""`gradaccum_jax.sharded_cross_entropy`: the dense loss and gradient on four devices, in a process of their own; what it refuses."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("optax", reason="optax is not installed")
import jax
import jax.numpy as jnp

import gradaccum
from conformance_tests.framework_tests.jax_versions import needs_shard_map
from gradaccum_jax import sharded_cross_entropy

SCRIPT = Path(__file__).with_name("jax_sharded_cross_entropy.py")
SECONDS = 300
"""A deadlock would last for ever; the script takes a few seconds."""


@needs_shard_map
def test_four_devices() -> None:
    run = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, timeout=SECONDS, check=False)
    assert run.returncode == 0, run.stderr[-4000:]


LOGITS, LABELS = jnp.zeros((2, 3)), jnp.asarray([0, 1])


@pytest.mark.parametrize(
    ("name", "arguments", "options"),
    [
        ("logits_shard", ([[0.0]], LABELS), {}),
        ("logits_shard", (LABELS[:, None], LABELS), {}),
        ("logits_shard", (LOGITS[:, :0], LABELS), {}),
        ("labels", (LOGITS, [0, 1]), {}),
        ("labels", (LOGITS, LOGITS), {}),
        ("labels", (LOGITS, LABELS[:1]), {}),
        ("labels", (LOGITS[0, 0], LABELS), {}),
        ("ignore_index", (LOGITS, LABELS), {"ignore_index": None}),
        ("label_smoothing", (LOGITS, LABELS), {"label_smoothing": -0.1}),
        ("label_smoothing", (LOGITS, LABELS), {"label_smoothing": "much"}),
        ("reduction", (LOGITS, LABELS), {"reduction": "median"}),
        ("axis_name", (LOGITS, LABELS), {"axis_name": None}),
    ],
)
def test_bad_input(name: str, arguments: tuple[Any, Any], options: dict[str, Any]) -> None:
    with pytest.raises((gradaccum.ArgumentTypeError, gradaccum.ArgumentValueError), match=rf"^{name}: expected"):
        sharded_cross_entropy(*arguments, **{"axis_name": "model"} | options)


@needs_shard_map
@pytest.mark.parametrize("lift", [lambda f: f, jax.jit, lambda f: jax.vmap(f, axis_name="model")], ids=["eager", "jit", "vmap"])
def test_outside_of_shard_map(lift: Any) -> None:
    with pytest.raises(gradaccum.UsageError, match=r"^axis_name: expected an axis of"):
        lift(lambda x: sharded_cross_entropy(x, jnp.zeros(x.shape[:-1], int), axis_name="model"))(jnp.zeros((2, 2, 3)))
