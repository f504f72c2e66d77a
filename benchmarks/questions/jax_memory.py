"""JAX: memory and time of one gradient of a BERT-like encoder: the large batch, accumulated, with recomputation, and both.

Memory is that of the compiled program: its temporaries and what it returns, from XLA's own analysis.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp

import gradaccum_jax
from benchmarks.case import Case, Curve
from benchmarks.contestants.bert import ACCUMULATE, BATCHES, BOTH, FEW_LAYERS, MICRO_BATCH, QUICK_BATCHES, RECOMPUTE, WAYS, Encoder
from benchmarks.memory_time import answers


def cases(quick: bool) -> Iterator[Case | Curve]:
    sizes = QUICK_BATCHES if quick else BATCHES
    memory = {(way, items): peak_of(way, items) / 2**20 for way in WAYS for items in sizes}
    yield from answers("JAX", FEW_LAYERS, sizes, window, memory)


def window(way: str, items: int, shape: Encoder = FEW_LAYERS) -> Callable[[], object]:
    """One gradient of a batch of `items` sequences."""
    params, x = inputs(items, shape)
    run = compiled(way, items, shape)
    return lambda: jax.block_until_ready(run(params, x))  # type: ignore[no-untyped-call]


def peak_of(way: str, items: int, shape: Encoder = FEW_LAYERS) -> int:
    """Bytes beside the parameters and the batch."""
    memory: Any = compiled(way, items, shape).memory_analysis()
    return int(memory.temp_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes)


@cache
def compiled(way: str, items: int, shape: Encoder) -> Any:
    """The program."""
    block = gradaccum_jax.recompute(_block, static_argnums=2) if way in (RECOMPUTE, BOTH) else _block

    def loss(params: Any, x: Any) -> Any:
        for layer in params:
            x = block(layer, x, shape.heads)
        return jnp.mean(jnp.square(x))

    accumulates = way in (ACCUMULATE, BOTH)
    value_and_grad = gradaccum_jax.value_and_grad(loss, micro_batch_size=MICRO_BATCH) if accumulates else jax.value_and_grad(loss)
    return jax.jit(value_and_grad).lower(*inputs(items, shape)).compile()


def inputs(items: int, shape: Encoder) -> tuple[Any, Any]:
    """Parameters and a batch, always the same."""
    keys = iter(jax.random.split(jax.random.key(0), 4 * shape.layers + 1))
    d = shape.width
    shapes = {"qkv": (d, 3 * d), "out": (d, d), "up": (d, 4 * d), "down": (4 * d, d)}
    params = [{name: 0.02 * jax.random.normal(next(keys), size) for name, size in shapes.items()} for _ in range(shape.layers)]
    return params, jax.random.normal(next(keys), (items, shape.length, d))


def _block(layer: Any, x: Any, heads: int) -> Any:
    q, k, v = (part.reshape(*part.shape[:2], heads, -1) for part in jnp.split(x @ layer["qkv"], 3, axis=-1))
    x = jax.nn.standardize(x + jax.nn.dot_product_attention(q, k, v).reshape(x.shape) @ layer["out"])
    return jax.nn.standardize(x + jax.nn.gelu(x @ layer["up"]) @ layer["down"])
