"""The layered window of several devices: that of one device with the whole batch, one
reduction per part, one gather per layer and pass.
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
from conformance_tests.framework_tests.jax_workers.common import (
    DEVICES,
    MESH,
    P,
    adam,
    over,
)

LAYERS, WIDTH = 3, 2 * DEVICES
KINDS = (" all-reduce(", " all-gather(", " reduce-scatter(")
OPTIONS: dict[str, dict[str, Any]] = {
    "by layer": {"on_overflow": "ignore"},
    "kept": {"clip_norm": 0.1},
}


def prelude(p: Any, x: Any, mask: Any) -> Any:
    return jnp.tanh(x @ p["w"])


def layer(p: Any, x: Any, *_: Any) -> Any:
    return x + jnp.tanh(x @ p["w"])


def loss_fn(p: Any, x: Any, _: Any, mask: Any) -> Any:
    return jnp.sum(mask * jnp.sum((x @ p["w"]) ** 2, -1)) / jnp.maximum(mask.sum(), 1)


def whole(params: Any, x: Any, mask: Any) -> Any:
    x = jax.lax.scan(
        lambda x, p: (layer(p, x), None), prelude(params[0], x, mask), params[1]
    )[0]
    return loss_fn(params[2], x, None, mask)


def weight(x: Any, mask: Any) -> Any:
    return mask.sum()


def start() -> tuple[Any, Any, Any]:
    """Parameters, items, and which of these count: all of a device's may not."""
    rng = np.random.default_rng(0)
    shapes = ((WIDTH, WIDTH), (LAYERS, WIDTH, WIDTH), (WIDTH, 2))
    params = tuple(
        {"w": jnp.asarray(rng.normal(size=shape) / WIDTH)} for shape in shapes
    )
    mask = (rng.random(4 * DEVICES) < 0.7).astype(float)
    mask[4:8] = 0
    return params, rng.normal(size=(4 * DEVICES, WIDTH)), mask


def require_window(made: Any, losses: Any, options: dict[str, Any]) -> None:
    params, *batch = start()
    tx = gradaccum.wrap(adam(), steps=None, **options)
    loss, updates, _ = gradaccum_jax.value_and_update(
        whole, tx, steps=1, weight=weight
    )(params, tx.init(params), *batch)
    np.testing.assert_allclose(
        losses, np.broadcast_to(loss, np.shape(losses)), rtol=1e-12
    )
    expected = optax.apply_updates(params, updates)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12),
        made,
        expected,
    )


def counted(program: Any, *arguments: Any) -> list[int]:
    """How often the compiled program runs each of `KINDS`; those of a loop once in each
    turn.
    """
    text = re.sub(r"-start\(", "(", program.lower(*arguments).compile().as_text())
    parts = dict(
        re.findall(
            r"^(?:ENTRY )?(%\S+) \(.*?\{$(.*?)^\}", text, re.MULTILINE | re.DOTALL
        )
    )

    def runs(part: str) -> Any:
        found = np.array([part.count(kind) for kind in KINDS])
        for line in part.splitlines():
            turns = re.search(r'"known_trip_count":\{"n":"(\d+)"', line)
            for name in (
                set(re.findall(r"%[\w.\-]+", line.partition("(")[2])) & parts.keys()
            ):
                found += runs(parts[name]) * (
                    int(turns[1]) if turns and f"body={name}" in line else 1
                )
        return found

    return [
        int(number)
        for number in runs(parts[re.findall(r"^ENTRY (%\S+)", text, re.MULTILINE)[0]])
    ]


def layered_window() -> None:
    """Replicated parameters: one reduction of the prelude, of a layer and of the head,
    whatever the number of micro-batches.
    """
    params, *batch = start()
    for options in OPTIONS.values():
        found = []
        for steps in (1, 4):
            tx = gradaccum.wrap(adam(), steps=None, axis_name="data", **options)
            step = gradaccum_jax.layered_value_and_update(
                prelude, layer, loss_fn, tx, steps=steps, weight=weight
            )

            def train(params: Any, state: Any, *batch: Any, step: Any = step) -> Any:
                loss, params, state = step(params, state, *batch)
                return params, state, loss

            state, program = over(step.init)(params), jax.jit(over(train))
            made, state, losses = program(params, state, *batch)
            require_window(made, losses, options)
            assert gradaccum_jax.result(state).applied
            found.append(counted(program, params, state, *batch))
        assert found[0] == found[1]
        # The sums of all parts, and the weight, the loss and the window's numbers; a
        # newer XLA combines those outside of the loop.
        assert LAYERS + 1 <= found[0][0] <= LAYERS + 5
        assert found[0][1:] == [0, 0]


def layered_shards() -> None:
    """Sharded parameters: each layer is gathered once forwards and once backwards, and
    its sum is scattered once.
    """
    params, *batch = start()
    specs = ({"w": P("data")}, {"w": P(None, "data")}, {"w": P("data")})
    held = jax.tree.map(
        lambda leaf, spec: jax.device_put(leaf, jax.sharding.NamedSharding(MESH, spec)),
        params,
        specs,
    )

    def gather(part: Any) -> Any:
        return jax.tree.map(
            lambda leaf: jax.lax.all_gather(leaf, "data", axis=0, tiled=True), part
        )

    for options in OPTIONS.values():
        tx = gradaccum.wrap(adam(), steps=None, shard_axes="data", **options)
        step = gradaccum_jax.layered_value_and_update(
            prelude,
            layer,
            loss_fn,
            tx,
            steps=4,
            weight=weight,
            gather=gather,
            axis_name="data",
        )
        state = step.init(held)
        like = optax.tree.map_params(
            tx,
            lambda _, spec: spec,
            tx.init(held),
            specs,
            transform_non_params=lambda _: P(),
        )
        like = (
            like if state.accumulator is not None else like._replace(accumulator=None)
        )
        ins, outs = (specs, like, P("data"), P("data")), (P(), specs, like)
        program = jax.jit(jax.shard_map(step, mesh=MESH, in_specs=ins, out_specs=outs))
        loss, made, state = program(held, state, *batch)
        require_window(made, loss, options)
        # a layer twice
        assert counted(program, held, state, *batch)[1:] == [
            2 * LAYERS + 2,
            LAYERS + 2,
        ]
