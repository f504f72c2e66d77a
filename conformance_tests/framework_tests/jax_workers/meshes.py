"""Meshes of several axes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import gradaccum
import gradaccum_jax
from conformance_tests.framework_tests.jax_versions import on_mesh
from conformance_tests.framework_tests.jax_workers.common import P, over
from conformance_tests.framework_tests.jax_workers.windows import collectives

X = np.random.default_rng(30).normal(size=(3, 8, 6))
START = {"w": np.ones((6, 4)), "b": np.zeros(4)}


def loss_fn(params: Any, x: Any) -> Any:
    return jnp.square(x @ params["w"] + params["b"]).mean()


def train(mesh: Any, axis: Any, params: Any) -> tuple[Any, str]:
    """One window of three micro-batches: the parameters after it, and the optimized
    program.
    """
    tx = gradaccum.wrap(optax.adam(0.1), steps=3, clip_norm=0.1, axis_name=axis)

    def step(params: Any, state: Any, x: Any) -> Any:
        updates, state = tx.update(jax.grad(loss_fn)(params, x), state, params)
        return optax.apply_updates(params, updates), state

    state, run = over(tx.init, mesh, axis)(params), over(step, mesh, axis)
    for x in X:
        params, state = run(params, state, x)
    assert gradaccum_jax.result(state).optimizer_step == 1
    return params, run.lower(params, state, X[0]).compile().as_text()


def require_large_batch(params: Any) -> None:
    tx = optax.chain(optax.clip_by_global_norm(0.1), optax.adam(0.1))
    start = jax.tree.map(jnp.asarray, START)
    updates, _ = tx.update(
        jax.grad(loss_fn)(start, X.reshape(-1, 6)), tx.init(start), start
    )
    expected = optax.apply_updates(start, updates)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(np.asarray(a), b, rtol=1e-10),
        params,
        expected,
    )


def devices(*shape: int) -> Any:
    return np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape)


def two_axes() -> None:
    mesh = jax.sharding.Mesh(devices(2, 2), ("pod", "data"))
    params, text = train(
        mesh,
        ("pod", "data"),
        jax.device_put(START, jax.sharding.NamedSharding(mesh, P())),
    )
    require_large_batch(params)
    assert collectives(text) == ([], ["all-reduce"])


def axis_for_the_compiler() -> None:
    """Parameters are sharded over an axis that does not share the window: they stay
    so.
    """
    mesh = jax.sharding.Mesh(devices(2, 2), ("data", "model"))
    shapes = {"w": P(None, "model"), "b": P("model")}
    params, _ = train(
        mesh,
        "data",
        {
            name: jax.device_put(leaf, jax.sharding.NamedSharding(mesh, shapes[name]))
            for name, leaf in START.items()
        },
    )
    require_large_batch(params)
    assert params["w"].sharding.shard_shape(params["w"].shape) == (6, 2), params[
        "w"
    ].sharding


def explicit_axes() -> None:
    kinds = jax.sharding.AxisType
    require_large_batch(
        train(
            jax.make_mesh(
                (4, 1), ("data", "model"), axis_types=(kinds.Explicit, kinds.Auto)
            ),
            "data",
            START,
        )[0]
    )
    mesh = jax.make_mesh((4,), ("data",), axis_types=(kinds.Explicit,))
    require_large_batch(train(mesh, "data", START)[0])
    with on_mesh(mesh):
        params, _ = train(
            mesh, "data", jax.device_put(START, jax.sharding.NamedSharding(mesh, P()))
        )
    require_large_batch(params)
    mesh, shapes = (
        jax.make_mesh((2, 2), ("data", "model"), axis_types=(kinds.Explicit,) * 2),
        {"w": P(None, "model"), "b": P("model")},
    )
    given = {
        name: jax.device_put(leaf, jax.sharding.NamedSharding(mesh, shapes[name]))
        for name, leaf in START.items()
    }
    params, _ = train(mesh, "data", given)
    require_large_batch(params)
    if (
        jax.__version_info__ >= (0, 10)
        # jax.shard_map of JAX 0.7 gathers what is sharded along an explicit axis that
        # it leaves alone
    ):
        assert params["w"].sharding.shard_shape(params["w"].shape) == (6, 2), params[
            "w"
        ].sharding
