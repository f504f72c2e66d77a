"""JAX: what XLA takes to compile the step of a model of many small tensors, each a few operations of the program.

A run traces, lowers and compiles one step; CPU seconds. `gradaccum` measures the window's norm, which `optax.MultiSteps` does not.
"no check" leaves the norm out, and the difference is what one look at every tensor takes to compile. "by hand" is the least that a window
can be which skips a gradient that is not finite: a sum, a look and the optimizer, with no weights, norm, loss, result or loss scale.
Where it takes more than 1.1 of MultiSteps, so does all that looks at the gradient.
"""

from __future__ import annotations

import time
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
    "by hand": lambda inner: by_hand(inner, 4),
}


def cases(quick: bool) -> Iterator[Case]:
    for tensors in TENSORS[:1] if quick else TENSORS:
        params = {f"w{place}": jnp.ones((8, 8)) for place in range(tensors)}
        for name, inner in OPTIMIZERS.items():
            contestants = {label: partial(compiled, make(inner), params) for label, make in MAKERS.items()}
            yield Case(f"{tensors} tensors of 8x8, {name}", BASELINE, contestants, clock=time.process_time)


def by_hand(inner: Any, steps: int) -> Any:
    def init(params: Any) -> Any:
        return jnp.zeros((), jnp.int32), inner.init(params), jax.tree.map(jnp.zeros_like, params)

    def update(gradients: Any, state: Any, params: Any) -> Any:
        count, held, total = state
        total = jax.tree.map(lambda a, b: jnp.where(count == 0, 0, a) + b, total, gradients)
        ends = jax.lax.cond(count + 1 == steps, finite, lambda _: jnp.asarray(False), total)

        def run(total: Any, held: Any) -> Any:
            return inner.update(jax.tree.map(lambda leaf: leaf / steps, total), held, params)

        total, held = jax.lax.cond(ends, run, lambda *kept: kept, total, held)
        updates = jax.tree.map(lambda leaf: jnp.where(ends, leaf, -0.0), total)
        return updates, ((count + 1) % steps, held, total)

    return optax.GradientTransformation(init, update)


def finite(total: Any) -> Any:
    """Look at 16 tensors in one kernel: one kernel for each takes XLA ten times as long."""
    leaves = jax.tree.leaves(total)
    groups = [leaves[start : start + 16] for start in range(0, len(leaves), 16)]
    return jnp.isfinite(jnp.stack([jnp.sum(sum(0 * leaf for leaf in group)) for group in groups]).sum())


def compiled(tx: Any, params: Any) -> object:
    def step(params: Any, state: Any, gradients: Any) -> Any:
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    return jax.jit(step, donate_argnums=(0, 1)).lower(params, jax.eval_shape(tx.init, params), params).compile()
