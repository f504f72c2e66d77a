"""`gradaccum_jax.sharded_cross_entropy`: what it refuses on one device."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import gradaccum
from conformance_tests.framework_tests.jax_versions import needs_shard_map
from gradaccum_jax import sharded_cross_entropy

LOGITS, LABELS = jnp.zeros((2, 3)), jnp.asarray([0, 1])


@pytest.mark.parametrize(
    ("name", "arguments", "options"),
    [
        ("logits_shard", ([[0.0]], LABELS), {}),
        ("logits_shard", (LABELS[:, None], LABELS), {}),
        ("logits_shard", (LOGITS[:, :0], LABELS), {}),
        ("labels", (LOGITS, [0, 1]), {}),
        ("labels", (LOGITS[0, 0], LABELS), {}),
        ("axis_name", (LOGITS, LABELS), {"axis_name": None}),
    ],
)
def test_bad_input(
    name: str, arguments: tuple[Any, Any], options: dict[str, Any]
) -> None:
    with pytest.raises(
        (gradaccum.ArgumentTypeError, gradaccum.ArgumentValueError),
        match=rf"^{name}: expected",
    ):
        sharded_cross_entropy(*arguments, **{"axis_name": "model"} | options)


@needs_shard_map
@pytest.mark.parametrize(
    "lift",
    [lambda f: f, jax.jit, lambda f: jax.vmap(f, axis_name="model")],
    ids=["eager", "jit", "vmap"],
)
def test_outside_of_shard_map(lift: Any) -> None:
    with pytest.raises(gradaccum.UsageError, match=r"^axis_name: expected an axis of"):
        lift(
            lambda x: sharded_cross_entropy(
                x, jnp.zeros(x.shape[:-1], int), axis_name="model"
            )
        )(jnp.zeros((2, 2, 3)))
