"""A script of `test_jax_everyday` on four devices: a training script calls `init` where
it has its parameters, and passes `last` on.
"""

from __future__ import annotations

import os
from typing import Any

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import gradaccum
import gradaccum_jax
from conformance_tests.framework_tests.jax_versions import on_mesh
from conformance_tests.framework_tests.refusing import refused

MESH = Mesh(np.array(jax.devices()), ("data",))
X = np.random.default_rng(0).normal(size=(6, 8, 3)).astype(np.float32)
START = {"w": jnp.ones(3)}


def loss_fn(params: Any, x: Any) -> Any:
    return jnp.mean((x @ params["w"] - 1) ** 2)


def wrapped(**options: Any) -> Any:
    return gradaccum.wrap(
        optax.adam(0.1), steps=4, clip_norm=0.5, axis_name="data", **options
    )


def train(tx: Any, params: Any, state: Any, mesh: Any = MESH) -> Any:
    """Six micro-batches: a window of four, and one that the loader's end closes."""

    def step(params: Any, state: Any, x: Any, last: Any) -> Any:
        updates, state = tx.update(
            jax.grad(loss_fn)(params, x), state, params, weight=len(x), last=last
        )
        return optax.apply_updates(params, updates), state

    over = gradaccum_jax.data_parallel(step, mesh, "data")
    for x, last in gradaccum_jax.epoch(X):
        params, state = over(params, state, x, last)
    assert over._cache_size() <= 2  # parameters come back on all devices
    assert gradaccum_jax.result(state).applied
    assert gradaccum_jax.result(state).optimizer_step == 2
    return params


def wanted() -> Any:
    large = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(0.1))
    params, state = START, large.init(START)
    for window in (X[:4], X[4:]):
        updates, state = large.update(
            jax.grad(loss_fn)(params, window.reshape(-1, 3)), state, params
        )
        params = optax.apply_updates(params, updates)
    return params


def assert_close(made: Any) -> None:
    np.testing.assert_allclose(np.asarray(made["w"]), wanted()["w"], rtol=1e-5)


def told() -> None:
    """Flax's `TrainState.create` calls `init`; so does a script under `jax.eval_shape`
    or `jax.jit`.
    """
    tx = wrapped(mesh=MESH)
    inside = gradaccum_jax.data_parallel(tx.init, MESH, "data")(START)
    created = TrainState.create(apply_fn=None, params=START, tx=tx)
    shapes = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), inside)
    for state in (
        created.opt_state,
        jax.jit(tx.init)(START),
        jax.eval_shape(tx.init, START),
    ):
        assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), state) == shapes
    assert created.opt_state.weight.sharding.is_equivalent_to(
        NamedSharding(MESH, PartitionSpec("data")), 1
    )
    jax.tree.map(np.testing.assert_array_equal, created.opt_state, inside)
    assert_close(train(tx, created.params, created.opt_state))


def set_around() -> None:
    tx = wrapped()
    # JAX 0.6 fails in its own matmul.
    for kind in (AxisType.Auto, AxisType.Explicit)[
        : 1 + (jax.__version_info__ >= (0, 7))
    ]:
        mesh = jax.make_mesh((4,), ("data",), axis_types=(kind,))
        with on_mesh(mesh):
            assert_close(train(tx, START, tx.init(START), mesh))


def unknown() -> None:
    """Without a mesh, or in that of other axes, it is refused, and the error says what
    to write.
    """
    with refused(
        gradaccum.UsageError,
        "axis_name: expected an axis of the jax.shard_map around it",
        "mesh=mesh",
    ):
        wrapped().init(START)
    with (
        on_mesh(jax.make_mesh((4,), ("model",))),
        refused(gradaccum.UsageError, "axis_name", "mesh=mesh"),
    ):
        wrapped().init(START)
    with refused(gradaccum.ArgumentTypeError, "mesh: expected a jax.sharding.Mesh"):
        wrapped(mesh=4)
    with refused(gradaccum.ArgumentTypeError, "axis_name: expected axes of the mesh"):
        gradaccum.wrap(optax.adam(0.1), steps=4, mesh=MESH)
    with refused(gradaccum.ArgumentValueError, "axis_name: expected axes of the mesh"):
        gradaccum.wrap(optax.adam(0.1), steps=4, mesh=MESH, axis_name="model")


def a_flag_of_each_device() -> None:
    """A window ends on all devices or on none."""
    tx = wrapped(mesh=MESH)

    def step(params: Any, state: Any, x: Any, last: Any) -> Any:
        return params, tx.update(
            jax.grad(loss_fn)(params, x), state, params, last=last[0]
        )[1]

    with refused(
        gradaccum.UsageError, "last: expected a value that is the same on all devices"
    ):
        gradaccum_jax.data_parallel(step, MESH, "data")(
            START, tx.init(START), X[0], np.ones(4, bool)
        )


if __name__ == "__main__":
    for check in (told, set_around, unknown, a_flag_of_each_device):
        check()
        print(check.__name__, "holds")
