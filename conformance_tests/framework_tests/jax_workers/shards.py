"""Parameters that are sharded inside `jax.shard_map`: what a window decides is what one
device with all of them would.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import gradaccum
import gradaccum_jax

from ..refusing import refused
from .common import DEVICES, P, assert_close, inside

SIDE = math.isqrt(DEVICES)
MESH = jax.make_mesh(
    (SIDE, SIDE), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2
)
SPECS = {"copy": P(), "rows": P("model"), "half": P(None, "model")}
SHAPES = {"copy": (3,), "rows": (4, 3), "half": (3, 2)}
RNG = np.random.default_rng(0)


def drawn(*leading: int) -> Any:
    return {
        name: np.asarray(RNG.normal(size=(*leading, *shape)), np.float32)
        for name, shape in SHAPES.items()
    }


START = drawn()
GRADS = drawn(6)
BAD = {**GRADS, "rows": GRADS["rows"].copy()}
BAD["rows"][1, 3, 0] = np.inf  # in the last device's part only


def apart(*leading: Any) -> Any:
    return {name: P(*leading, *spec) for name, spec in SPECS.items()}


def train(tx: Any, params: Any, gradients: Any) -> tuple[Any, Any]:
    """The parameters after all micro-batches, and the result of each."""

    def one(carry: Any, gradient: Any) -> Any:
        typed = jax.tree.map(lambda leaf, p: leaf.astype(p.dtype), gradient, params)
        loss = gradient["copy"][0]
        updates, state = tx.update(typed, carry[1], carry[0], value=loss)
        params_after = optax.apply_updates(carry[0], updates)
        return (params_after, state), gradaccum_jax.result(state)

    (params, _), results = jax.lax.scan(one, (params, tx.init(params)), gradients)
    return params, results


def like_one_device() -> None:
    """Norm, clipping, skipping, dropping and masters are those of one device that has
    all parameters. At the second size, squares vanish in float32.
    """
    for options, gradients, size in (
        ({}, GRADS, 1.0),
        ({}, GRADS, 1e-30),
        ({}, BAD, 1.0),
        ({"on_overflow": "drop_micro_batch"}, BAD, 1.0),
        ({"skip_norm": 3.0}, GRADS, 1.0),
        ({"master_weights": True}, GRADS, 1.0),
    ):
        inner = optax.adam(0.1) if size == 1 else optax.sgd(0.1)
        given = {"steps": 2, "clip_norm": 0.5, **options}
        whole = gradaccum.wrap(inner, **given)
        shared = gradaccum.wrap(inner, **given, shard_axes="model")
        half = jnp.bfloat16 if "master_weights" in options else jnp.float32
        params = {**START, "half": jnp.asarray(START["half"], half)}
        scaled = jax.tree.map(
            lambda leaf, size=size: leaf * np.float32(size), gradients
        )
        found = inside(
            lambda *args, tx=shared: train(tx, *args),
            (SPECS, apart(None)),
            (SPECS, P()),
            MESH,
        )(params, scaled)
        wanted = jax.jit(lambda *args, tx=whole: train(tx, *args))(params, scaled)
        for a, b in zip(*map(jax.tree.leaves, (found, wanted)), strict=True):
            np.testing.assert_allclose(np.float32(a), np.float32(b), 1e-5, 1e-7)
        assert bool(found[1].overflow.any()) == (gradients is BAD)
        assert found[1].applied.any()


def with_workers() -> None:
    """Shards along one axis of the mesh, and along the other devices with micro-batches
    of their own.
    """
    options: dict[str, Any] = {"steps": 2, "clip_norm": 0.5}
    own = drawn(6, SIDE)
    shared = gradaccum.wrap(
        optax.sgd(0.1), **options, axis_name="data", shard_axes="model"
    )

    def local(params: Any, gradients: Any) -> Any:
        mine = {name: leaf[:, 0] for name, leaf in gradients.items()}
        params, results = train(shared, params, mine)
        return params, results.grad_norm, results.loss

    specs = (SPECS, apart(None, "data"))
    found = inside(local, specs, (SPECS, P(), P()), MESH)(START, own)
    mean = {name: leaf.mean(1) for name, leaf in own.items()}
    wanted, results = train(gradaccum.wrap(optax.sgd(0.1), **options), START, mean)
    assert_close(found, (wanted, results.grad_norm, results.loss), 1e-5)


def models_of_their_own() -> None:
    """``shard_axes=()``: each device's norm is its own. Nobody guesses which it is."""

    def updates_of(**options: Any) -> Any:
        tx = gradaccum.wrap(optax.sgd(0.1), steps=1, clip_norm=1.0, **options)
        return inside(
            lambda p: tx.update(p, tx.init(p), p)[0], P("model"), P("model"), MESH
        )(np.ones(4, np.float32))

    for axes, norm in (((), (4 / SIDE) ** 0.5), (("model",), 2.0)):
        found = updates_of(shard_axes=axes)
        assert_close(found, np.full(4, -0.1 / norm), 1e-6)
    with refused(gradaccum.UsageError, "shard_axes: expected", "=('model',)"):
        updates_of()
