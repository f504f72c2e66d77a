"""JAX: a transformer of GPT-2-small shape in bfloat16 on a GPU, in tokens per second;
on a CPU a tiny one, to see that it runs.

Parameters are float32 and cast to bfloat16 for the forward pass, the usual mixed
precision in JAX.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax

import gradaccum
from benchmarks.case import Case
from benchmarks.contestants.transformer import GPT2_SMALL, STEPS, TINY, Shape, rates

BASELINE = "optax.MultiSteps"


def cases(quick: bool) -> Iterator[Case]:
    device = jax.devices()[0]
    shape = GPT2_SMALL if device.platform == "gpu" and not quick else TINY
    ids = jax.random.randint(
        jax.random.key(1), (shape.sequences, shape.length), 0, shape.vocabulary
    )
    transformations = {
        BASELINE: optax.MultiSteps(optax.adamw(1e-4), STEPS),
        "gradaccum": gradaccum.wrap(optax.adamw(1e-4), steps=STEPS),
    }
    windows, counts = dict[str, Callable[[], object]](), dict[str, dict[str, float]]()
    for name, tx in transformations.items():
        windows[name], counts[name] = _window(tx, shape, ids)
    name = f"{shape.layers} x {shape.width}, {shape.length} tokens x {shape.sequences}"
    yield Case(
        name,
        BASELINE,
        windows,
        counts,
        rates=dict.fromkeys(windows, rates(shape, device.device_kind)),
    )


def _params(shape: Shape) -> Any:
    keys = iter(jax.random.split(jax.random.key(0), 3 + 4 * shape.layers))

    def matrix(rows: int, columns: int) -> Any:
        return 0.02 * jax.random.normal(next(keys), (rows, columns))

    d = shape.width
    blocks = [
        {
            "qkv": matrix(d, 3 * d),
            "out": matrix(d, d),
            "up": matrix(d, 4 * d),
            "down": matrix(4 * d, d),
        }
        for _ in range(shape.layers)
    ]
    return {
        "tokens": matrix(shape.vocabulary, d),
        "positions": matrix(shape.length, d),
        "blocks": blocks,
    }


def _loss(params: Any, ids: Any, shape: Shape) -> Any:
    params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
    x = params["tokens"][ids] + params["positions"]
    for block in params["blocks"]:
        x = x + _attention(_normalized(x) @ block["qkv"], shape) @ block["out"]
        x = x + jax.nn.gelu(_normalized(x) @ block["up"]) @ block["down"]
    logits = (_normalized(x) @ params["tokens"].T)[:, :-1].astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, ids[:, 1:]).mean()


def _attention(qkv: Any, shape: Shape) -> Any:
    q, k, v = (
        part.reshape(*part.shape[:2], shape.heads, -1)
        for part in jnp.split(qkv, 3, axis=-1)
    )
    return jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(
        *qkv.shape[:2], shape.width
    )


def _normalized(x: Any) -> Any:
    return jax.nn.standardize(x.astype(jnp.float32)).astype(x.dtype)


def _window(
    tx: Any, shape: Shape, ids: Any
) -> tuple[Callable[[], object], dict[str, float]]:
    def step(params: Any, state: Any, ids: Any) -> tuple[Any, Any]:
        updates, state = tx.update(jax.grad(_loss)(params, ids, shape), state, params)
        return optax.apply_updates(params, updates), state

    carried = [params := _params(shape), tx.init(params)]
    compiled = jax.jit(step, donate_argnums=(0, 1)).lower(*carried, ids).compile()
    memory: Any = compiled.memory_analysis()

    def window() -> object:
        for _ in range(STEPS):
            carried[:] = compiled(*carried, ids)
        return jax.block_until_ready(carried)  # type: ignore[no-untyped-call]

    return window, {
        "temp GiB": memory.temp_size_in_bytes / 2**30,
        "argument GiB": memory.argument_size_in_bytes / 2**30,
    }
