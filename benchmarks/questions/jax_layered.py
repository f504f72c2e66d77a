"""JAX, float32, AdamW: a window layer by layer, beside the usual one, jitted and
donated; the usual one recomputes its layers too.

All apply the update that the large batch makes. Memory is that of the compiled program
beside the parameters and their moments: the sums, and what XLA puts aside. The wide
layers have few items, so that reading and writing the parameters takes the time; the
narrow ones have little work at all, and show what the layers' order itself costs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import gradaccum
import gradaccum_jax
from benchmarks.case import Case, Curve

BASELINE = "usual window"
LAYERED = "layered"
ITEMS = 4
"""Of a micro-batch."""
MICRO_BATCHES = (1, 4, 16)
SHAPES = {
    "4 layers of 1024": (4, 1024),
    "16 layers of 1024": (16, 1024),
    "16 layers of 64": (16, 64),
}


def cases(quick: bool) -> Iterator[Case | Curve]:
    needed: dict[str, list[float]] = {}
    for name, (layers, width) in SHAPES.items():
        width = min(width, 64) if quick else width
        for micro_batches in MICRO_BATCHES:
            windows = {
                way: window(way, layers, width, micro_batches)
                for way in (BASELINE, LAYERED)
            }
            if name == "16 layers of 1024":
                for way, (_, mebibytes) in windows.items():
                    needed.setdefault(way, []).append(mebibytes)
            counts = {
                way: {"needed MiB": mebibytes}
                for way, (_, mebibytes) in windows.items()
            }
            yield Case(
                f"{name}, {micro_batches} micro-batches",
                BASELINE,
                {way: run for way, (run, _) in windows.items()},
                counts,
            )
    for way, sizes in needed.items():
        yield Curve(
            "JAX: a window of 16 layers of 1024",
            way,
            MICRO_BATCHES,
            sizes,
            "micro-batches",
            "sums and temporaries, MiB",
        )


def window(
    way: str, layers: int, width: int, micro_batches: int
) -> tuple[Callable[[], object], float]:
    """One update, and the MiB that its program needs beside parameters and moments."""
    keys = jax.random.split(jax.random.key(0), 4)
    weights = 0.5 / width**0.5 * jax.random.normal(keys[0], (layers, width, width))
    params: Any = ({}, {"w": weights, "b": jnp.zeros((layers, width))})
    x, y = (jax.random.normal(key, (ITEMS * micro_batches, width)) for key in keys[1:3])
    tx = gradaccum.wrap(optax.adamw(1e-3), None, on_overflow="ignore")
    options: dict[str, Any] = {"micro_batch_size": ITEMS}
    step: Any
    if way == BASELINE:
        usual, state = (
            gradaccum_jax.value_and_update(_loss, tx, **options),
            tx.init(params),
        )

        def step(params: Any, state: Any, x: Any, y: Any) -> Any:
            loss, updates, state = usual(params, state, x, y)
            return loss, optax.apply_updates(params, updates), state

    else:
        step = gradaccum_jax.layered_value_and_update(
            lambda outer, x, y: x, _layer, _compare, tx, **options
        )
        state = step.init(params)
    compiled: Any = (
        jax.jit(step, donate_argnums=(0, 1)).lower(params, state, x, y).compile()
    )
    memory = compiled.memory_analysis()
    bare = sum(
        leaf.nbytes
        for leaf in jax.tree.leaves((params, state._replace(accumulator=None), x, y))
    )
    total = (
        memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes
        + memory.temp_size_in_bytes
    )
    held = [params, state]

    def run() -> object:
        loss, *held[:] = compiled(*held, x, y)
        return np.asarray(loss)

    return run, float(total - bare) / 2**20


def _layer(own: Any, hidden: Any, *_: Any) -> Any:
    return jax.nn.gelu(hidden @ own["w"] + own["b"])


def _compare(own: Any, hidden: Any, _: Any, y: Any) -> Any:
    return jnp.mean(jnp.square(hidden - y))


def _loss(params: Any, x: Any, y: Any) -> Any:
    library: Any = jax  # mypy does not see the name.
    recomputed = library.checkpoint(_layer)
    return _compare(
        None,
        jax.lax.scan(lambda hidden, own: (recomputed(own, hidden), None), x, params[1])[
            0
        ],
        x,
        y,
    )
