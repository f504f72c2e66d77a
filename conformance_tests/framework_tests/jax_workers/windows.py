"""The window of four devices is the large batch of all: its numbers, its program, and
other numbers of devices.
"""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import gradaccum
import gradaccum_jax
from benchmarks.questions import jax_workers as question

from ..jax_versions import partition
from ..refusing import refused
from .common import (
    COLLECTIVE,
    DEVICES,
    P,
    adam,
    assert_close,
    inside,
    over,
    parameters,
    placed,
)


def scan() -> None:
    """A whole epoch inside: in `data_parallel`, and in a `jax.shard_map` of the user's
    own, where the state never comes out. A frozen parameter counts nowhere.
    """
    inner = partition(
        {"trained": adam(), "frozen": optax.set_to_zero()},
        {"w": "trained", "z": "frozen"},
    )
    tx = gradaccum.wrap(inner, steps=3, axis_name="data", clip_norm=0.5)
    params = {"w": jnp.ones(2), "z": jnp.ones(3)}
    gradients = np.random.default_rng(15).normal(size=(DEVICES, 6, 2))

    def epoch(params: Any, state: Any, rows: Any) -> Any:
        def body(carry: Any, g: Any) -> Any:
            grads = {"w": g, "z": jnp.full(3, jnp.nan)}
            updates, state = tx.update(grads, carry[1], carry[0])
            return (optax.apply_updates(carry[0], updates), state), None

        return jax.lax.scan(body, (params, state), rows[0])[0]

    after, _ = over(epoch)(params, over(tx.init)(params), gradients)
    own = inside(lambda p, rows: epoch(p, tx.init(p), rows)[0], (P(), P("data")))
    large = gradaccum.wrap(adam(), steps=1, clip_norm=0.5)
    wanted = {"w": params["w"]}
    state = large.init(wanted)
    for g in (gradients[:, :3].mean((0, 1)), gradients[:, 3:].mean((0, 1))):
        updates, state = large.update({"w": jnp.asarray(g)}, state, wanted)
        wanted = optax.apply_updates(wanted, updates)
    wanted["z"] = params["z"]
    assert_close(after, wanted)
    assert_close(own(params, gradients), wanted)


def computations(text: str) -> dict[str, str]:
    """The computations of an optimized program by name; the one that runs in every
    micro-batch is ``"entry"``.
    """
    found = re.findall(
        r"^(ENTRY )?%?([\w.\-]+) \(.*?\{\n(.*?)^\}",
        text,
        flags=re.MULTILINE | re.DOTALL,
    )
    return {"entry" if entry else name: body for entry, name, body in found}


def collectives(text: str) -> tuple[list[str], list[str]]:
    """Those of every micro-batch, and those that stand in a branch or loop."""
    parts = computations(text)
    entry = COLLECTIVE.findall(parts.pop("entry"))
    return entry, [name for body in parts.values() for name in COLLECTIVE.findall(body)]


def compiled(params: Any, **options: Any) -> Any:
    """A step on all devices, or on one without ``axis_name``, with everything
    donated.
    """
    tx = gradaccum.wrap(optax.adamw(0.1), **options)
    lift = over if "axis_name" in options else jax.jit

    def loss(params: Any, x: Any) -> Any:
        squares = [jnp.sum(leaf * leaf).real for leaf in jax.tree.leaves(params)]
        return sum(squares) * x.mean()

    def step(params: Any, state: Any, x: Any) -> Any:
        grads = jax.grad(loss)(params, x)
        updates, state = tx.update(grads, state, params, weight=x.sum())
        return optax.apply_updates(params, updates), state

    held = placed(params, P()) if "axis_name" in options else params
    return (
        jax.jit(lift(step), donate_argnums=(0, 1))
        .lower(held, lift(tx.init)(held), jnp.ones(2 * DEVICES, jnp.float32))
        .compile()
    )


def one_reduction_per_window() -> None:
    """However long the window is, with every option that looks at the gradient: the
    sums, the weight, the flag and the loss. One for each dtype.
    """
    params = {f"p{index}": jnp.ones((8, 16), jnp.float32) for index in range(5)}
    looking = {
        "clip_norm": 1.0,
        "skip_norm": 9.0,
        "on_overflow": "drop_micro_batch",
        "loss_scale": gradaccum.DynamicLossScale(),
    }
    for options in ({"steps": 1}, {"steps": 16, **looking}):
        text = compiled(params, axis_name="data", **options).as_text()
        assert collectives(text) == ([], ["all-reduce"]), options
        size = sum(leaf.nbytes for leaf in params.values())
        assert question.reductions(text, 0) == (1, size + 12)
    mixed = {"f": params["p0"], "d": jnp.ones(4), "z": jnp.ones(2, jnp.complex64)}
    entry, ending = collectives(compiled(mixed, steps=4, axis_name="data").as_text())
    assert (entry, len(ending) <= 3) == ([], True)


OPTIONS: dict[str, Any] = {
    "steps": 4,
    "clip_norm": 1.0,
    "on_overflow": "drop_micro_batch",
}


def opened(tx: Any) -> tuple[Any, Any]:
    """Parameters and state after two of four micro-batches, as a checkpoint holds them;
    one of these was dropped on one device.
    """
    params = parameters()
    rng = np.random.default_rng(20)

    def step(params: Any, state: Any, gradients: Any, weight: Any) -> Any:
        own = jax.tree.map(lambda leaf: leaf[0], gradients)
        _, state = tx.update(own, state, params, weight=weight[0], value=own["c"])
        return params, state

    state = over(tx.init)(params)
    for index, weights in enumerate(([1.0, 2.5, 0.0, 3.0], [2.5, 1.0, 3.0, 0.0])):
        gradients = {
            name: rng.normal(size=(DEVICES, *leaf.shape))
            for name, leaf in params.items()
        }
        if index:
            gradients["w"][2] = np.inf
        params, state = over(step)(params, state, gradients, np.asarray(weights))
    return jax.tree.map(np.asarray, (params, state))


def other_number_of_devices() -> None:
    """To two devices: the sums of all, the weight, the loss and the flag are what they
    were, and the window ends on them.
    """
    tx = gradaccum.wrap(adam(), axis_name="data", **OPTIONS)
    params, saved = opened(tx)

    def flush(params: Any, state: Any) -> Any:
        updates, state = gradaccum_jax.flush(tx, state, params)
        return optax.apply_updates(params, updates), state

    state = gradaccum_jax.redistributed(saved, 2)
    for name in ("weight", "loss", "accumulator"):
        own, old = (
            jax.tree.map(lambda leaf: leaf.sum(0), getattr(held, name))
            for held in (state, saved)
        )
        assert_close(own, old)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("data",))
    made = over(flush, mesh)(params, state)
    wanted = over(flush)(params, saved)
    assert_close(made[0], wanted[0])
    assert gradaccum_jax.result(made[1]).overflow


def checked_state() -> None:
    """Plain dicts are rebuilt. Other options and other shapes are refused; between two
    windows the options may change.
    """

    def shared(**options: Any) -> Any:
        return gradaccum.wrap(adam(), axis_name="data", **OPTIONS, **options)

    tx = shared()
    alone = gradaccum.wrap(adam(), **OPTIONS)
    params, saved = opened(tx)
    restored = gradaccum_jax.check_state(tx, saved._asdict(), params)
    jax.tree.map(np.testing.assert_array_equal, restored, saved)
    short = saved._replace(overflow=saved.overflow[:2])
    for other, state, words in (
        (shared(reduction="sum"), saved, ("reduction",)),
        (alone, saved, ("weight", "(4,)")),
        (tx, short, ("overflow", "(4,)")),
    ):
        with refused(gradaccum.CheckpointError, *words):
            gradaccum_jax.check_state(other, state, params)

    def discard(params: Any, state: Any) -> Any:
        return params, gradaccum_jax.discard(tx, state)

    closed = jax.tree.map(jnp.asarray, over(discard)(params, restored)[1])
    scaled = shared(loss_scale=8.0)
    assert gradaccum_jax.check_state(scaled, closed, params).loss_scale == 8
