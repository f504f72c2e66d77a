"""Programs on four devices, each in its own process: varying types, meshes, ensembles,
and no needless collective.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from conformance_tests.framework_tests.jax_versions import needs_shard_map

START = """
import re
import jax, jax.numpy as jnp, numpy as np, optax
import gradaccum, gradaccum_jax
from conformance_tests.framework_tests.jax_versions import on_mesh, shard_map
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

mesh = Mesh(np.array(jax.devices()), ("d",))
# optax.adam begins with zeros that JAX 0.6 types alike on all devices, and jax.lax.scan takes no other type back.
INNER = optax.sgd(0.1) if (0, 6, 1) <= jax.__version_info__ < (0, 7) else optax.adam(0.1)
OPTIMIZERS = [
    gradaccum.wrap(optax.adam(0.1), steps=2, clip_norm=1.0, shard_axes=()),
    gradaccum.wrap(optax.adam(0.1), steps=lambda step: 2, on_overflow="drop_micro_batch"),
    gradaccum.wrap(optax.sgd(0.1), steps=None),
    gradaccum_jax.MultiSteps(INNER, 2),
]
rng = np.random.default_rng(0)
W, G = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((8, 3, 5), (6, 8, 3, 5)))

def train(tx, w, gradients):
    def step(carry, g):
        updates, state = tx.update({"w": g}, carry[1], carry[0])
        return (optax.apply_updates(carry[0], updates), state), None
    return jax.lax.scan(step, ({"w": w}, tx.init({"w": w})), gradients)[0][0]["w"]

def collectives(text):
    return re.findall(r" (all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute)(?:-start)?\\(", text)
"""
VARYING = """
spec = (P("d"), P(None, "d"))
def ensemble(w, g):
    return jax.vmap(lambda w, g: train(tx, w, g), (0, 1))(w, g)
def alone(w, g):
    return train(tx, w[0], g[:, 0])[None]
def reduced(w, g):
    return train(tx, w, jax.lax.pmean(g[:, 0], "d"))
for tx in OPTIMIZERS:
    expected = np.stack([jax.jit(lambda w, g: train(tx, w, g))(W[i], G[:, i]) for i in range(8)])
    made = jax.jit(shard_map(ensemble, mesh=mesh, in_specs=spec, out_specs=P("d")))(W, G)
    np.testing.assert_allclose(made, expected, rtol=1e-5, atol=1e-6)
    made = jax.jit(shard_map(alone, mesh=mesh, in_specs=spec, out_specs=P("d")))(W[:4], G[:, :4])
    np.testing.assert_allclose(made, expected[:4], rtol=1e-5, atol=1e-6)
    made = jax.jit(shard_map(reduced, mesh=mesh, in_specs=(P(), P(None, "d")), out_specs=P()))(W[0], G[:, :4])
    expected = jax.jit(lambda w, g: train(tx, w, g))(W[0], G[:, :4].mean(1))
    np.testing.assert_allclose(made, expected, rtol=1e-5, atol=1e-6)
"""
COLUMNS = """
shapes = {"w": P(None, "d"), "b": P("d"), "c": P()}
params = {"w": jnp.ones((64, 64)), "b": jnp.ones(64), "c": jnp.ones(8)}
def step(tx, params, state):
    updates, state = tx.update(params, state, params)
    return optax.apply_updates(params, updates), state
explicit = jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Explicit,))
for tx in OPTIMIZERS:
    given = {name: jax.device_put(leaf, NamedSharding(mesh, shapes[name])) for name, leaf in params.items()}
    text = jax.jit(step, static_argnums=0, donate_argnums=(1, 2)).lower(tx, given, tx.init(given)).compile().as_text()
    assert set(collectives(text)) <= {"all-reduce"}, collectives(text)
    wanted = step(tx, *step(tx, params, tx.init(params)))[0]
    with on_mesh(explicit):
        given = {name: jax.device_put(leaf, NamedSharding(explicit, shapes[name])) for name, leaf in params.items()}
        made, state = given, tx.init(given)
        for _ in range(2):
            made, state = jax.jit(step, static_argnums=0)(tx, made, state)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(np.asarray(a), b, rtol=1e-5), made, wanted)
    assert jax.typeof(made["w"]).sharding.spec == P(None, "d")
"""
ENSEMBLE = """
params = {"w": jnp.asarray(rng.normal(size=(8, 64, 64)), jnp.float32), "b": jnp.ones((8, 16))}
def step(tx, params, state):
    updates, state = tx.update(params, state, params)
    return optax.apply_updates(params, updates), state
over = NamedSharding(mesh, P("d"))
for tx in OPTIMIZERS:
    both = jax.jit(jax.vmap(lambda params, state: step(tx, params, state)), donate_argnums=(0, 1))
    start = (params, jax.vmap(tx.init)(params))
    made = both.lower(*jax.device_put(start, over)).compile()
    assert collectives(made.as_text()) == []
    most = 3.2 if jax.__version_info__ >= (0, 10) else 5.2  # Each device's part; XLA of JAX 0.7 keeps two more.
    assert made.memory_analysis().temp_size_in_bytes <= most * 64 * 64 * 4 * 2
    first = "micro_step" if hasattr(start[1], "micro_step") else "mini_step"
    apart = start[1]._replace(**{first: jnp.arange(8, dtype=jnp.int32) % 2})
    for state in (start[1], apart):
        wanted = jax.jit(jax.vmap(lambda params, state: step(tx, params, state)))(params, state)[0]
        got = both(*jax.device_put(jax.tree.map(jnp.copy, (params, state)), over))[0]
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), got, wanted)
"""


def run_on_four_devices(program: str) -> None:
    script = textwrap.dedent(START) + program
    environment = {
        **os.environ,
        "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
        "JAX_PLATFORMS": "cpu",
    }
    ran = subprocess.run(
        [sys.executable, "-c", script],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]


def test_shard_map_checks_varying_gradients() -> None:
    """``check_vma=True``, the default, accepts a model on each device, an ensemble on
    each, and gradients reduced before the update.
    """
    run_on_four_devices(VARYING)


def test_columns_are_not_gathered() -> None:
    """Parameters are sharded by columns. An Auto mesh gathers nothing; an Explicit mesh
    traces and keeps its types.
    """
    run_on_four_devices(COLUMNS)


def test_sharded_ensemble_needs_no_collective() -> None:
    """Members lie on several devices. They get one device's values, also where windows
    end apart, in scratch like `optax.MultiSteps`'.
    """
    run_on_four_devices(ENSEMBLE)


SCRIPTS = {
    "jax_shards": (
        "parameters are sharded inside ``shard_map``: what a window decides is what one"
        " device with all of them would"
    ),
    "jax_explicit_mesh gradients": (
        "typed ``unreduced``, they are refused by name, with the way out"
    ),
    "jax_explicit_mesh parameters": "",
    "jax_explicit_mesh added_up": "",
    "jax_large_batch_devices": (
        "one reduction per call and tensor; weights, keys, aux, windows and coupled"
        " losses of all items"
    ),
}


@pytest.mark.parametrize(
    "program",
    [
        pytest.param(name, marks=needs_shard_map if "devices" not in name else ())
        for name in SCRIPTS
    ],
)
def test_script(program: str) -> None:
    """A deadlock would last for ever; a program takes some seconds."""
    name, *check = program.split()
    command = [
        sys.executable,
        "-W",
        "error",
        Path(__file__).with_name(f"{name}.py"),
        *check,
    ]
    ran = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=600
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
