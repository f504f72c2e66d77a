"""A window over four devices is that of one device with all micro-batches."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import gradaccum
import gradaccum_jax
from conformance_tests.framework_tests.jax_workers.common import (
    DEVICES,
    MESH,
    P,
    adam,
    check,
    events,
    over,
    parameters,
)

SCALE = gradaccum.DynamicLossScale(init_scale=8.0, growth_interval=2)


def schedule() -> None:
    """Windows of two and three micro-batches, and a short one that is flushed."""
    todo = events(6, windows=1, steps=2) + events(7, windows=1, steps=3) + events(8, windows=1, steps=2, close="flush")
    assert all(result.applied for result in check(todo, {"steps": [(0, 2), (1, 3)]}))


def half_precision() -> None:
    """The sums are float32, and so reduced; in float16 an update that does not fit is an overflow on all devices."""
    for dtype in (jnp.bfloat16, jnp.float16):
        check(events(12, windows=2, steps=2), {"steps": 2}, off=2e-2, dtype=dtype)
    tiny = {name: jnp.full((DEVICES, *leaf.shape), 2.0**-9) for name, leaf in parameters().items()}
    tx = gradaccum.wrap(optax.sgd(1.0), steps=None, axis_name="data")
    state = over(tx.init)(parameters(jnp.bfloat16))

    def add(params: Any, state: Any, gradients: Any) -> Any:
        return params, tx.update(jax.tree.map(lambda leaf: leaf[0].astype(jnp.bfloat16), gradients), state, params)[1]

    for _ in range(300):
        state = over_once(add)(parameters(jnp.bfloat16), state, tiny)[1]
    np.testing.assert_array_equal(state.accumulator["w"], np.full((DEVICES, 3, 5), 300 * 2.0**-9, np.float32))


def masters() -> None:
    options = {"steps": 2, "master_weights": True, "loss_scale": SCALE, "clip_norm": 1.0}
    check(events(13, windows=4, steps=2, bad=math.inf), options, off=2e-2, dtype=jnp.bfloat16)


def mixed_dtypes() -> None:
    """Integers take no part; complex and float32 parameters stand beside each other."""
    params = {"i": jnp.arange(3), "z": jnp.ones(2, jnp.complex64), "f": jnp.ones(2, jnp.float32), "none": None}
    tx = gradaccum.wrap(optax.sgd(1.0), steps=1, axis_name="data")

    def step(params: Any, state: Any, x: Any) -> Any:
        grads = {"i": None, "z": x[0] * params["z"], "f": x[0] * params["f"], "none": None}
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    after, _ = over(step)(params, over(tx.init)(params), jnp.arange(4, dtype=jnp.float32))
    np.testing.assert_array_equal(after["f"], 1 - np.full(2, 1.5))
    np.testing.assert_array_equal(after["z"], 1 - np.full(2, 1.5))
    np.testing.assert_array_equal(after["i"], np.arange(3))


def model() -> None:
    """By `jax.grad` of a network, with padding, an unused parameter, and a loss that comes out for each device."""
    rng = np.random.default_rng(14)
    params = {"a": jnp.asarray(rng.normal(size=(3, 8))), "b": jnp.asarray(rng.normal(size=(8, 2))), "unused": jnp.ones(2)}
    x, mask = rng.normal(size=(4, 12, 3)), rng.integers(2, size=(4, 12)).astype(float)
    mask[2, :3] = 0

    def loss_fn(params: Any, x: Any, mask: Any) -> Any:
        losses = (jnp.tanh(x @ params["a"]) @ params["b"]).sum(1) ** 2
        return (mask * losses).sum() / jnp.maximum(mask.sum(), 1)

    def step(params: Any, state: Any, x: Any, mask: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_fn)(params, x, mask)
        updates, state = tx.update(grads, state, params, weight=mask.sum())
        return optax.apply_updates(params, updates), state, loss, jax.lax.pmean(loss, "data")

    tx = gradaccum.wrap(adam(), steps=4, axis_name="data")
    after, state = params, over(tx.init)(params)
    for index in range(4):
        after, state, losses, loss = over_once(step)(after, state, x[index], mask[index])
        np.testing.assert_allclose(losses.mean(), loss, rtol=1e-12)
    grads = jax.grad(loss_fn)(params, x.reshape(-1, 3), mask.reshape(-1))
    updates, _ = adam().update(grads, adam().init(params), params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9), after, optax.apply_updates(params, updates))


def chain() -> None:
    """The wrapped optimizer stands in a chain, whose other states are replicated."""
    tx = optax.chain(gradaccum.wrap(optax.sgd(0.5), steps=1, axis_name="data"), optax.trace(0.9))
    params = {"w": jnp.ones(3)}

    def step(params: Any, state: Any, x: Any) -> Any:
        updates, state = tx.update({"w": x[0] * jnp.ones(3)}, state, params)
        return optax.apply_updates(params, updates), state

    after, state = over(step)(params, over(tx.init)(params), jnp.arange(4.0))
    np.testing.assert_array_equal(after["w"], 1 - 0.5 * np.full(3, 1.5))
    np.testing.assert_array_equal(state[1].trace["w"], -0.5 * np.full(3, 1.5))


def scan() -> None:
    """A whole epoch inside: in `data_parallel`, and in a `jax.shard_map` of the user's own, where the state never comes out."""
    tx = gradaccum.wrap(adam(), steps=3, axis_name="data", clip_norm=0.5)
    params, gradients = {"w": jnp.ones(2)}, np.random.default_rng(15).normal(size=(DEVICES, 6, 2))

    def epoch(params: Any, state: Any, rows: Any) -> Any:
        def body(carry: Any, g: Any) -> Any:
            updates, state = tx.update({"w": g}, carry[1], carry[0])
            return (optax.apply_updates(carry[0], updates), state), None

        return jax.lax.scan(body, (params, state), rows[0])[0]

    after, _ = over(epoch)(params, over(tx.init)(params), gradients)
    whole = jax.shard_map(lambda p, rows: epoch(p, tx.init(p), rows)[0], mesh=MESH, in_specs=(P(), P("data")), out_specs=P())
    again = jax.jit(whole)(params, gradients)
    alone = gradaccum.wrap(adam(), steps=1, clip_norm=0.5)
    state, expected = alone.init(params), params
    for g in (gradients[:, :3].mean((0, 1)), gradients[:, 3:].mean((0, 1))):
        updates, state = alone.update({"w": jnp.asarray(g)}, state, expected)
        expected = optax.apply_updates(expected, updates)
    for made in (after, again):
        np.testing.assert_allclose(made["w"], expected["w"], rtol=1e-12)


def ensemble() -> None:
    """Members under `jax.vmap` on each device, all of them shared by the devices."""
    tx = gradaccum.wrap(optax.sgd(1.0), steps=1, axis_name="data", clip_norm=1.0)
    params, gradients = jnp.zeros((3, 2)), np.random.default_rng(16).normal(size=(DEVICES, 3, 2))

    def step(params: Any, state: Any, rows: Any) -> Any:
        updates, state = jax.vmap(tx.update)(rows[0], state, params)
        return params + updates, state

    after, state = over(step)(params, over(jax.vmap(tx.init))(params), gradients)
    mean = gradients.mean(0)
    norms = np.linalg.norm(mean, axis=1, keepdims=True)
    np.testing.assert_allclose(after, -mean / np.maximum(norms, 1), rtol=1e-12)
    np.testing.assert_allclose(gradaccum_jax.result(state).grad_norm, norms[:, 0], rtol=1e-12)
    assert gradaccum_jax.result(state).overflow.shape == (3,)


_kept: dict[int, Any] = {}


def over_once(step: Any) -> Any:
    """`over(step)`, compiled once."""
    return _kept.setdefault(id(step), over(step))
