"""Parameters sharded inside `jax.shard_map` on host devices: run by
`test_jax_sharding`, ``python FILE CONTROL_FLOW``.

A process of its own: the number of devices is fixed when JAX starts.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradaccum
import gradaccum_jax

P = jax.sharding.PartitionSpec
MODEL = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("model",))
DATA = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("data",))
BOTH = jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 2), ("data", "model"))
SPECS = {"copy": P(), "rows": P("model"), "half": P(None, "model")}
SHAPES = {"copy": (3,), "rows": (4, 3), "half": (3, 2)}
SIZES = (1.0, 1e-30, 1e25)
"""At the second size, squares vanish in float32; at the third they overflow."""
rng = np.random.default_rng(0)
START = {
    name: np.asarray(rng.normal(size=shape), np.float32)
    for name, shape in SHAPES.items()
}
MADE = {
    name: np.asarray(rng.normal(size=(6, *shape)), np.float32)
    for name, shape in SHAPES.items()
}
BAD = {**MADE, "rows": MADE["rows"].copy()}
BAD["rows"][1, 3, 0] = np.inf  # in the last device's part only
Lifted = Callable[..., Any]


def start(dtype: Any = np.float32) -> Any:
    return {**START, "half": jnp.asarray(START["half"], dtype)}


def lifted(
    function: Lifted, specs: Any, out: Any, mesh: Any = MODEL, **options: Any
) -> Lifted:
    made: Lifted = jax.jit(
        jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=out, **options)
    )
    return made


def train(tx: Any, params: Any, gradients: Any) -> tuple[Any, Any]:
    """The parameters after all micro-batches, and the result of each."""

    def one(carry: Any, gradient: Any) -> Any:
        typed = jax.tree.map(lambda leaf, p: leaf.astype(p.dtype), gradient, params)
        updates, state = tx.update(typed, carry[1], carry[0])
        return (optax.apply_updates(carry[0], updates), state), gradaccum_jax.result(
            state
        )

    (params, _), results = jax.lax.scan(one, (params, tx.init(params)), gradients)
    return params, results


def near(found: Any, wanted: Any, rtol: float = 1e-5) -> None:
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(
            np.float32(a), np.float32(b), rtol=rtol, atol=1e-7
        ),
        found,
        wanted,
    )


def check_like_one_device() -> None:
    """Norm, clipping, skipping, dropping and masters are those of one device that has
    all parameters.
    """
    apart = jax.tree.map(lambda spec: P(None, *spec), SPECS)
    cases: list[tuple[dict[str, Any], Any, float]] = [
        ({}, MADE, size) for size in SIZES
    ]
    cases += [
        ({}, BAD, 1),
        ({"on_overflow": "drop_micro_batch"}, BAD, 1),
        ({"skip_norm": 3.0}, MADE, 1),
        ({"master_weights": True}, MADE, 1),
    ]
    for given, gradients, size in cases:
        options = {"steps": 2, "clip_norm": 0.5, **given}
        scaled = {name: leaf * np.float32(size) for name, leaf in gradients.items()}
        inner = optax.adam(0.1) if size == 1 else optax.sgd(0.1)
        params = start(jnp.bfloat16 if "master_weights" in given else np.float32)
        whole, shared = (
            gradaccum.wrap(inner, **options, **own)
            for own in ({}, {"shard_axes": "model"})
        )
        found = lifted(
            lambda *args, tx=shared: train(tx, *args), (SPECS, apart), (SPECS, P())
        )(params, scaled)
        wanted = jax.jit(lambda *args, tx=whole: train(tx, *args))(params, scaled)
        near(found, wanted, 1e-5)
        assert bool(found[1].overflow.any()) == (gradients is BAD)
        assert bool(found[1].applied.any())


def check_with_workers() -> None:
    """Shards along one axis of the mesh, and along the other devices with micro-batches
    of their own; also what a window knows.
    """
    options: dict[str, Any] = {"steps": 2, "clip_norm": 0.5}
    shared, whole = (
        gradaccum.wrap(optax.sgd(0.1), **options, axis_name="data", **own)
        for own in ({"shard_axes": "model"}, {})
    )
    own = {
        name: np.asarray(rng.normal(size=(6, 2, *shape)), np.float32)
        for name, shape in SHAPES.items()
    }

    def found_by(tx: Any, specs: Any, mesh: Any) -> Any:
        def local(params: Any, gradients: Any) -> Any:
            params, results = train(
                tx, params, {name: leaf[:, 0] for name, leaf in gradients.items()}
            )
            return params, results.grad_norm

        apart = jax.tree.map(lambda spec: P(None, "data", *spec), specs)
        return lifted(local, (specs, apart), (specs, P()), mesh)(start(), own)

    found, without_shards = (
        found_by(shared, SPECS, BOTH),
        found_by(whole, dict.fromkeys(SPECS, P()), DATA),
    )
    near(found, without_shards, 1e-4)
    wanted = train(
        gradaccum.wrap(optax.sgd(0.1), steps=2, clip_norm=0.5),
        start(),
        {name: leaf.mean(1) for name, leaf in own.items()},
    )
    near(found[:2], (wanted[0], wanted[1].grad_norm))


def once(tx: Any, params: Any) -> Any:
    return tx.update(params, tx.init(params), params)[0]


def check_untold() -> None:
    """Where nobody said whether arrays are shards, what would depend on it raises."""
    rows: Any = {"rows": P("model")}
    cases: list[tuple[Any, dict[str, Any], bool]] = [
        (SPECS, {}, False),
        (SPECS, {"shard_axes": "model"}, True),
    ]
    cases += [
        (rows, {}, True),
        (rows, {"clip_norm": 1.0}, False),
        (rows, {"skip_norm": 1.0}, False),
    ]
    cases += [
        (rows, {"clip_norm": 1.0, "shard_axes": axes}, True)
        for axes in ((), "model", ("model",))
    ]
    for specs, given, allowed in cases:
        tx = gradaccum.wrap(optax.sgd(0.1), steps=2, **given)
        run = lifted(lambda params, tx=tx: once(tx, params), (specs,), specs)
        if allowed:
            run({name: START[name] for name in specs})
        else:
            with pytest.raises(
                gradaccum.UsageError,
                match=(
                    r"^shard_axes: expected"
                    r" .*\['model'\].*shard_axes=\('model',\).*shard_axes=\(\)"
                ),
            ):
                run({name: START[name] for name in specs})


def check_refused() -> None:
    tx = gradaccum.wrap(optax.sgd(0.1), steps=2, shard_axes="model")
    for run in (
        jax.jit(lambda p: once(tx, p)),
        lifted(lambda p: once(tx, p), P("model"), P("model"), check_vma=False),
    ):
        with pytest.raises(
            gradaccum.UsageError, match=r"^axis_name: expected an axis of"
        ):
            run(START["rows"])
    with pytest.raises(
        gradaccum.ArgumentTypeError,
        match=r"^shard_axes: expected the name of a mesh axis",
    ):
        gradaccum.wrap(optax.sgd(0.1), steps=2, shard_axes=["model"])


if __name__ == "__main__":
    check_like_one_device()
    check_with_workers()
    check_untold()
    check_refused()
