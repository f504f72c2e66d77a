"""JAX: memory and time of one gradient of a BERT-like encoder: the large batch,
accumulated, with recomputation, and both.

Memory is that of the compiled program: its temporaries and what it returns, from XLA's
own analysis. The gradients are among it, and nothing makes them smaller.

Attention and MLP are recomputed each by itself, so that the second run of one of them
is all that lives at once. The last MLP is not: the backward pass needs its activations
first, and to free them saves nothing. The layers are a Python loop here, in which
XLA:CPU starts all second runs early, and nothing was saved (691 MiB beside the 679 MiB
of the large batch). XLA:CPU does not look into a conditional, so each layer of the
large batch is the branch of one. Two sequences at once need less than their gradients,
and such a layer returns them all before one of them is added to the sum (254 MiB in
place of 196), so micro-batches are recomputed without it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

import gradaccum_jax
from benchmarks.case import Case, Curve
from benchmarks.contestants.bert import (
    ACCUMULATE,
    BOTH,
    MICRO_BATCH,
    RECOMPUTE,
    Encoder,
)
from benchmarks.memory_time import answers


def cases(quick: bool) -> Iterator[Case | Curve]:
    yield from answers("JAX", quick, gradient, peak_of)


def gradient(way: str, items: int, shape: Encoder) -> Callable[[], object]:
    """One gradient of a batch of `items` sequences."""
    params, x = inputs(items, shape)
    run = compiled(way, items, shape)
    return lambda: jax.block_until_ready(run(params, x))  # type: ignore[no-untyped-call]


def peak_of(way: str, items: int, shape: Encoder) -> float:
    """MiB beside the parameters and the batch."""
    memory: Any = compiled(way, items, shape).memory_analysis()
    return (
        float(
            memory.temp_size_in_bytes
            + memory.output_size_in_bytes
            - memory.alias_size_in_bytes
        )
        / 2**20
    )


@functools.cache
def compiled(way: str, items: int, shape: Encoder) -> Any:
    """The program."""
    accumulates = way in (ACCUMULATE, BOTH)
    parts: tuple[Callable[..., Any], ...] = (
        functools.partial(_attend, heads=shape.heads),
        _transform,
    )
    layers = [parts] * shape.layers
    if way in (RECOMPUTE, BOTH):
        library: Any = jax  # mypy does not see the name.
        recomputed = tuple(
            library.checkpoint(part)
            if accumulates
            else _branch(library.checkpoint(part))
            for part in parts
        )
        layers = [recomputed] * (shape.layers - 1) + [(recomputed[0], parts[1])]

    def loss(params: Any, x: Any) -> Any:
        for parts, layer in zip(layers, params, strict=True):
            for part, own in zip(parts, layer, strict=True):
                x = part(own, x)
        return jnp.mean(jnp.square(x))

    value_and_grad = (
        gradaccum_jax.value_and_grad(loss, micro_batch_size=MICRO_BATCH)
        if accumulates
        else jax.value_and_grad(loss)
    )
    return jax.jit(value_and_grad).lower(*inputs(items, shape)).compile()


def inputs(items: int, shape: Encoder) -> tuple[Any, Any]:
    """Parameters and a batch, always the same."""
    keys = iter(jax.random.split(jax.random.key(0), 4 * shape.layers + 1))
    d = shape.width
    shapes = {"qkv": (d, 3 * d), "out": (d, d)}, {"up": (d, 4 * d), "down": (4 * d, d)}

    def made(sizes: dict[str, tuple[int, int]]) -> dict[str, Any]:
        return {
            name: 0.02 * jax.random.normal(next(keys), size)
            for name, size in sizes.items()
        }

    params = [tuple(made(sizes) for sizes in shapes) for _ in range(shape.layers)]
    return params, jax.random.normal(next(keys), (items, shape.length, d))


def _branch(part: Callable[..., Any]) -> Callable[..., Any]:
    """`part` as the branch of a conditional that is always taken. The barrier hides the
    constant from XLA.
    """
    barrier: Any = jax.lax.optimization_barrier
    return lambda own, x: jax.lax.cond(
        barrier(jnp.asarray(True)), part, lambda own, x: jnp.zeros_like(x), own, x
    )


def _attend(own: Any, x: Any, heads: int) -> Any:
    q, k, v = (
        part.reshape(*part.shape[:2], heads, -1)
        for part in jnp.split(x @ own["qkv"], 3, axis=-1)
    )
    return jax.nn.standardize(
        x + jax.nn.dot_product_attention(q, k, v).reshape(x.shape) @ own["out"]
    )


def _transform(own: Any, x: Any) -> Any:
    return jax.nn.standardize(x + jax.nn.gelu(x @ own["up"]) @ own["down"])
