"""A run of events on several devices, and the same run on one device that has all micro-batches in its window."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import gradaccum
import gradaccum_jax

DEVICES = jax.device_count()
"""Four, and 64 in some checks."""
P: Any = jax.sharding.PartitionSpec
MESH = jax.sharding.Mesh(np.array(jax.devices()), ("data",))
SHAPES = {"w": (3, 5), "b": (5,), "c": ()}
Tree = Any


class Event(NamedTuple):
    """One micro-batch on each device, or with no gradients the end of a window by the caller: by flush, or by discard."""

    gradients: Tree = None
    """One row for each device."""
    weight: Any = None
    """One number for each device."""
    close: str = ""


def parameters(dtype: Any = jnp.float64) -> Tree:
    rng = np.random.default_rng(1)
    return {name: jnp.asarray(rng.normal(size=shape), dtype) for name, shape in SHAPES.items()}


def events(seed: int, windows: int, steps: int, close: str = "", bad: float | None = None) -> list[Event]:
    """Micro-batches of unequal weights, some of them 0; with `bad` every third window has such a number on one device."""
    rng, made = np.random.default_rng(seed), []
    for window in range(windows):
        hurt = int(rng.integers(steps)) if bad is not None and window % 3 == 1 else -1
        for index in range(steps):
            gradients = {name: rng.normal(size=(DEVICES, *shape)) for name, shape in SHAPES.items()}
            if index == hurt:
                gradients["w"][rng.integers(DEVICES), 0, 0] = bad
            made.append(Event(gradients, rng.choice([0.0, 1.0, 2.5, 3.0], DEVICES)))
        made += [Event(close=close)] if close else []
    return made


def objective(params: Tree, gradients: Tree, state: Tree) -> Any:
    """A loss whose gradient is `gradients`: scaled, and not."""
    loss = sum(jnp.vdot(params[name], gradients[name].astype(params[name].dtype)) for name in params)
    return gradaccum_jax.scale_loss(loss, state), loss


def stepper(tx: Any) -> Callable[..., Any]:
    def step(params: Tree, state: Tree, gradients: Tree, weight: Any) -> Any:
        own = jax.tree.map(lambda leaf: leaf[0], gradients)
        grads, loss = jax.grad(objective, has_aux=True)(params, own, state)
        updates, state = tx.update(grads, state, params, weight=weight[0], value=loss)
        return optax.apply_updates(params, updates), state

    return step


def closer(tx: Any) -> dict[str, Callable[..., Any]]:
    def flush(params: Tree, state: Tree) -> Any:
        updates, state = gradaccum_jax.flush(tx, state, params)
        return optax.apply_updates(params, updates), state

    return {"flush": flush, "discard": lambda params, state: (params, gradaccum_jax.discard(tx, state))}


def over(function: Any, mesh: Any = MESH, axis: Any = "data") -> Any:
    return gradaccum_jax.data_parallel(function, mesh, axis)


def adam() -> Any:
    return optax.adam(0.1)


def many(steps: Any) -> Any:
    """The steps of one device that has all micro-batches."""
    return steps if steps is None else [(at, DEVICES * size) for at, size in steps] if isinstance(steps, list) else DEVICES * steps


def run_shared(todo: list[Event], params: Tree, options: dict[str, Any], inner: Any = None) -> list[Tree]:
    """(parameters, result) after each event, on four devices."""
    tx = gradaccum.wrap(inner or adam(), axis_name="data", **options)
    params = jax.device_put(params, jax.sharding.NamedSharding(MESH, P()))
    state, step = over(tx.init)(params), over(stepper(tx))
    ways, seen = {name: over(way) for name, way in closer(tx).items()}, []
    for event in todo:
        params, state = ways[event.close](params, state) if event.close else step(params, state, event.gradients, event.weight)
        seen.append((params, gradaccum_jax.result(state)))
    return seen


def run_alone(todo: list[Event], params: Tree, options: dict[str, Any], inner: Any = None) -> list[Tree]:
    """The same on one device: each event's micro-batches one after the other."""
    tx = gradaccum.wrap(inner or adam(), **{**options, "steps": many(options["steps"])})
    state, step, seen = tx.init(params), jax.jit(stepper(tx)), []
    ways = {name: jax.jit(way) for name, way in closer(tx).items()}
    for event in todo:
        if event.close:
            params, state = ways[event.close](params, state)
        for rank in range(0 if event.close else DEVICES):
            rows = jax.tree.map(lambda leaf, rank=rank: leaf[rank : rank + 1], event.gradients)
            params, state = step(params, state, rows, event.weight[rank : rank + 1])
        seen.append((params, gradaccum_jax.result(state)))
    return seen


def check(todo: list[Event], options: dict[str, Any], off: float = 1e-11, dtype: Any = jnp.float64) -> list[Any]:
    """Both runs agree after each event that ends a window; returns the results of these."""
    shared, alone = (run(todo, parameters(dtype), options) for run in (run_shared, run_alone))
    ended = []
    for (params, result), (expected, other) in zip(shared, alone, strict=True):
        if (result.micro_step == 0) != (other.micro_step == 0):
            raise AssertionError("a window ended on one side only")
        jax.tree.map(lambda a, b: np.testing.assert_allclose(as_double(a), as_double(b), rtol=off, atol=off), params, expected)
        if result.micro_step == 0:
            require_same(result, other, off)
            ended.append(jax.device_get(result))
    return ended


def require_same(result: Any, other: Any, off: float) -> None:
    for name in ("applied", "skipped", "overflow", "loss_scale", "optimizer_step"):
        assert getattr(result, name) == getattr(other, name), (name, result, other)
    np.testing.assert_allclose(result.grad_norm, other.grad_norm, rtol=max(off, 1e-6))
    np.testing.assert_allclose(result.loss, other.loss, rtol=max(off, 1e-6), atol=off)


def as_double(leaf: Any) -> Any:
    return np.asarray(leaf).astype(np.float64)
