"""JAX: what XLA takes to compile the step of a model of many small tensors, each a few operations of the program.

A run traces, lowers and compiles one step. `gradaccum` measures the window's norm, which `optax.MultiSteps` does not; "no check" leaves the
norm out, and the difference is what one look at every tensor takes to compile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

import gradaccum
from benchmarks.case import Case

BASELINE = "optax.MultiSteps"
TENSORS = (50, 300, 1000)
OPTIMIZERS = {"AdamW": optax.adamw(1e-3), "SGD": optax.sgd(1e-2)}
MAKERS: dict[str, Callable[[Any], Any]] = {
    BASELINE: lambda inner: optax.MultiSteps(inner, 4).gradient_transformation(),
    "gradaccum": lambda inner: gradaccum.wrap(inner, steps=4),
    "gradaccum, no check": lambda inner: gradaccum.wrap(inner, steps=4, on_overflow="ignore"),
}


def cases(quick: bool) -> Iterator[Case]:
    for tensors in TENSORS[:1] if quick else TENSORS:
        params = {f"w{place}": jnp.ones((8, 8)) for place in range(tensors)}
        for name, inner in OPTIMIZERS.items():
            contestants = {label: partial(compiled, make(inner), params) for label, make in MAKERS.items()}
            yield Case(f"{tensors} tensors of 8x8, {name}", BASELINE, contestants)


def compiled(tx: Any, params: Any) -> object:
    def step(params: Any, state: Any, gradients: Any) -> Any:
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    return jax.jit(step, donate_argnums=(0, 1)).lower(params, jax.eval_shape(tx.init, params), params).compile()
