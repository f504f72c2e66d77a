"""Meshes of several axes, explicit ones, and programs that the compiler partitions."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import gradaccum
import gradaccum_jax

from ..jax_versions import on_mesh
from .common import MESH, P, adam, assert_close, inside, over, placed
from .windows import collectives

RNG = np.random.default_rng(30)
X = RNG.normal(size=(6, 8, 6))
START = {"w": np.ones((6, 4)), "b": np.zeros(4)}
SPECS = {"w": P(None, "model"), "b": P("model")}
KINDS = jax.sharding.AxisType


def wrapped(axis: Any = "data", **options: Any) -> Any:
    return gradaccum.wrap(adam(), steps=4, clip_norm=0.1, axis_name=axis, **options)


def loss_fn(params: Any, x: Any) -> Any:
    return jnp.square(x @ params["w"] + params["b"]).mean()


def train(
    params: Any, mesh: Any = MESH, axis: Any = "data", state: Any = None
) -> tuple[Any, str]:
    """A window of four micro-batches and one that the loader's end closes: the
    parameters, which are those of large batches, and the optimized program.
    """
    tx = wrapped(axis)

    def step(params: Any, state: Any, x: Any, last: Any) -> Any:
        updates, state = tx.update(
            jax.grad(loss_fn)(params, x), state, params, weight=len(x), last=last
        )
        return optax.apply_updates(params, updates), state

    state = over(tx.init, mesh, axis)(params) if state is None else state
    run = over(step, mesh, axis)
    for x, last in gradaccum_jax.epoch(X):
        params, state = run(params, state, x, last)
    assert run._cache_size() <= 2  # parameters come back on all devices
    assert gradaccum_jax.result(state).optimizer_step == 2

    large = optax.chain(optax.clip_by_global_norm(0.1), adam())
    wanted = jax.tree.map(jnp.asarray, START)
    held = large.init(wanted)
    for window in (X[:4], X[4:]):
        grads = jax.grad(loss_fn)(wanted, window.reshape(-1, 6))
        updates, held = large.update(grads, held, wanted)
        wanted = optax.apply_updates(wanted, updates)
    assert_close(params, wanted, 1e-10)
    return params, run.lower(params, state, X[0], last).compile().as_text()


def start_outside() -> None:
    """`init` outside of `data_parallel`: the mesh is told, or set around the call."""
    tx = wrapped(mesh=MESH)
    wanted = over(tx.init)(START)
    shapes = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), wanted)
    for state in (tx.init(START), jax.eval_shape(tx.init, START)):
        assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), state) == shapes
    state = tx.init(START)
    split = jax.sharding.NamedSharding(MESH, P("data"))
    assert state.weight.sharding.is_equivalent_to(split, 1)
    train(START, state=state)
    with on_mesh(jax.make_mesh((4,), ("data",), axis_types=(KINDS.Auto,))):
        train(START, state=wrapped().init(START))


def two_axes() -> None:
    mesh = jax.make_mesh((2, 2), ("pod", "data"), axis_types=(KINDS.Auto,) * 2)
    _, text = train(placed(START, P(), mesh), mesh, ("pod", "data"))
    assert collectives(text) == ([], ["all-reduce"])


def axis_for_the_compiler() -> None:
    """Parameters are sharded over an axis that does not share the window: they stay
    so.
    """
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(KINDS.Auto,) * 2)
    params, _ = train(placed(START, SPECS, mesh), mesh)
    assert params["w"].sharding.shard_shape((6, 4)) == (6, 2)


def explicit_axes() -> None:
    mixed = (KINDS.Explicit, KINDS.Auto)
    train(START, jax.make_mesh((4, 1), ("data", "model"), axis_types=mixed))
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(KINDS.Explicit,) * 2)
    with on_mesh(mesh):
        given = placed(START, SPECS, mesh)
        params, _ = train(given, mesh, state=wrapped().init(given))
    # jax.shard_map of JAX 0.7 gathers what is sharded along an explicit axis that it
    # leaves alone.
    if jax.__version_info__ >= (0, 10):
        assert params["w"].sharding.shard_shape((6, 4)) == (6, 2)


# Optimizers that share no window.


OPTIMIZERS = [
    gradaccum.wrap(adam(), steps=2, clip_norm=1.0, shard_axes=()),
    gradaccum.wrap(adam(), steps=lambda step: 2, on_overflow="drop_micro_batch"),
]


def step_of(tx: Any) -> Any:
    def step(params: Any, state: Any, grads: Any) -> Any:
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return step


def scanned(tx: Any, w: Any, grads: Any) -> Any:
    def body(carry: Any, g: Any) -> Any:
        return step_of(tx)(*carry, g), None

    return jax.lax.scan(body, (w, tx.init(w)), grads)[0][0]


def varying() -> None:
    """``check_vma=True``, the default, accepts gradients that are reduced before the
    update.
    """
    w = jnp.asarray(RNG.normal(size=5))
    g = jnp.asarray(RNG.normal(size=(6, 8, 5)))
    for tx in OPTIMIZERS:

        def reduced(w: Any, g: Any, tx: Any = tx) -> Any:
            return scanned(tx, w, jax.lax.pmean(g.mean(1), "data"))

        mean = scanned(tx, w, g.mean(1))
        assert_close(inside(reduced, (P(), P(None, "data")))(w, g), mean)
