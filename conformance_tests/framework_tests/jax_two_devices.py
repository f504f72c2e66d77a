"""A script of `test_jax_devices`: an inner optimizer averages over two devices once per window, and one device's gradient is inf.

The test runs it in its own process: JAX fixes the number of devices when it starts, and a deadlock must not hang pytest.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"

import jax
import jax.numpy as jnp
import numpy as np
import optax

import gradaccum
import gradaccum_jax
from conformance_tests.framework_tests import jax_versions

AXIS = "devices"
KIND = jax.sharding.PartitionSpec(AXIS)
Lift = Callable[[Callable[..., Any]], Callable[..., Any]]


def shard_map(function: Callable[..., Any]) -> Callable[..., Any]:
    mesh = jax.sharding.Mesh(np.array(jax.devices()), (AXIS,))

    def one(*trees: Any) -> Any:
        made = function(*jax.tree.map(lambda leaf: leaf[0], trees))
        return jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], made)

    return jax.jit(jax_versions.shard_map(one, mesh=mesh, in_specs=KIND, out_specs=KIND, check_vma=False))


LIFTS: dict[str, Lift] = {"pmap": lambda function: jax.pmap(function, axis_name=AXIS), "shard_map": shard_map}


def averaging() -> Any:
    def update(gradients: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        return jax.tree.map(lambda g: jax.lax.pmean(g, AXIS), gradients), state

    return optax.chain(optax.GradientTransformation(lambda params: optax.EmptyState(), update), optax.sgd(1.0))


def train(tx: Any, lift: Lift, micro_batches: list[list[float]]) -> tuple[Any, Any]:
    """Return the updates of every micro-batch, shape (micro-batches, devices), and the last state."""
    params = jnp.zeros(2)
    update = lift(tx.update)
    state, made = lift(tx.init)(params), []
    for gradients in micro_batches:
        updates, state = update(jnp.asarray(gradients, jnp.float32), state, params)
        made.append(np.asarray(updates))
    return np.stack(made), state


def check_wrap(lift: Lift) -> None:
    scale = gradaccum.DynamicLossScale(init_scale=4.0)
    tx = gradaccum.wrap(averaging(), steps=2, loss_scale=scale)
    made, state = train(tx, lift, [[4, 8], [4, 8], [4, 8], [4, np.inf], [2, 6], [2, 6]])
    np.testing.assert_array_equal(made[:, 0], [0, -1.5, 0, 0, 0, -2])
    np.testing.assert_array_equal(made[:, 1], made[:, 0])
    assert state.loss_scale.tolist() == [2.0, 2.0], state.loss_scale
    assert state.skipped_windows.tolist() == [1, 1]


def check_multisteps(lift: Lift) -> None:
    tx = gradaccum_jax.MultiSteps(averaging(), 2, should_skip_update_fn=optax.skip_not_finite)
    made, _ = train(tx, lift, [[4, 8], [4, 8], [4, 8], [4, np.inf], [4, 8]])
    np.testing.assert_array_equal(made[:, 0], [0, -6, 0, 0, -6])
    np.testing.assert_array_equal(made[:, 1], made[:, 0])


def check_reduces_once_per_window() -> None:
    """Every all-reduce stands in a loop or branch that only the end of a window enters."""
    tx = gradaccum.wrap(averaging(), steps=2)
    held, state = jnp.zeros(2), shard_map(tx.init)(jnp.zeros(2))
    program = shard_map(tx.update).lower(held, state, held).compile().as_text()
    entry = program[program.index("\nENTRY") :]
    assert "all-reduce" in program
    assert "all-reduce" not in entry[: entry.index("\n}")]


if __name__ == "__main__":
    check_wrap(LIFTS[sys.argv[1]])
    check_multisteps(LIFTS[sys.argv[1]])
    check_reduces_once_per_window()
