"""JAX: what XLA takes to compile the step of a model of many small tensors, each a few
operations of the program.

A run traces, lowers and compiles one step; CPU seconds. `gradaccum` measures the
window's norm, which `optax.MultiSteps` does not. "no check" leaves the norm out, and
the difference is what one look at every tensor takes to compile. "by hand" is the least
that a window can be which skips a gradient that is not finite: a sum, a look and the
optimizer, with no weights, norm, loss, result or loss scale. "by hand, the same
promises" has a weight, a norm, counters and a result, written plainly. Where these two
take more than 1.1 of MultiSteps, so does all that promises the same.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

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
    "gradaccum, no check": lambda inner: gradaccum.wrap(
        inner, steps=4, on_overflow="ignore"
    ),
    "by hand": lambda inner: by_hand(inner, 4),
    "by hand, the same promises": lambda inner: promising(inner, 4),
}


def cases(quick: bool) -> Iterator[Case]:
    for tensors in TENSORS[:1] if quick else TENSORS:
        params = {f"w{place}": jnp.ones((8, 8)) for place in range(tensors)}
        for name, inner in OPTIMIZERS.items():
            contestants = {
                label: partial(compiled, make(inner), params)
                for label, make in MAKERS.items()
            }
            yield Case(
                f"{tensors} tensors of 8x8, {name}",
                BASELINE,
                contestants,
                clock=time.process_time,
            )


def by_hand(inner: Any, steps: int) -> Any:
    def init(params: Any) -> Any:
        return (
            jnp.zeros((), jnp.int32),
            inner.init(params),
            jax.tree.map(jnp.zeros_like, params),
        )

    def update(gradients: Any, state: Any, params: Any) -> Any:
        count, held, total = state
        total = jax.tree.map(
            lambda a, b: jnp.where(count == 0, 0, a) + b, total, gradients
        )
        ends = jax.lax.cond(
            count + 1 == steps, finite, lambda _: jnp.asarray(False), total
        )

        def run(total: Any, held: Any) -> Any:
            return inner.update(
                jax.tree.map(lambda leaf: leaf / steps, total), held, params
            )

        total, held = jax.lax.cond(ends, run, lambda *kept: kept, total, held)
        updates = jax.tree.map(lambda leaf: jnp.where(ends, leaf, -0.0), total)
        return updates, ((count + 1) % steps, held, total)

    return optax.GradientTransformation(init, update)


class Promised(NamedTuple):
    micro_step: Any
    optimizer_step: Any
    skipped_windows: Any
    weight: Any
    applied: Any
    skipped: Any
    grad_norm: Any
    inner: Any
    total: Any


def promising(inner: Any, steps: int) -> Any:
    def init(params: Any) -> Promised:
        number, real, flag = (
            jnp.zeros((), jnp.int32),
            jnp.zeros(()),
            jnp.zeros((), bool),
        )
        total = jax.tree.map(jnp.zeros_like, params)
        return Promised(
            number, number, number, real, flag, flag, real, inner.init(params), total
        )

    def update(gradients: Any, state: Promised, params: Any) -> Any:
        begins, full = state.micro_step == 0, state.micro_step + 1 == steps
        total = jax.tree.map(
            lambda a, b: jnp.where(begins, 0, a) + b, state.total, gradients
        )
        weight = jnp.where(begins, 0, state.weight) + 1
        norm = jax.lax.cond(
            full, lambda total: norm_of(total) / weight, lambda _: jnp.zeros(()), total
        )
        applied, skipped = full & jnp.isfinite(norm), full & ~jnp.isfinite(norm)

        def run(total: Any, held: Any) -> Any:
            return inner.update(
                jax.tree.map(lambda leaf: leaf / weight, total), held, params
            )

        total, held = jax.lax.cond(applied, run, lambda *kept: kept, total, state.inner)
        updates = jax.tree.map(lambda leaf: jnp.where(applied, leaf, -0.0), total)
        counters = (
            jnp.where(full, 0, state.micro_step + 1),
            state.optimizer_step + applied,
            state.skipped_windows + skipped,
        )
        numbers = (
            jnp.where(full, 0, weight),
            applied,
            skipped,
            jnp.where(full, norm, state.grad_norm),
        )
        return updates, Promised(
            *counters,
            *numbers,
            held,
            jax.tree.map(lambda leaf: jnp.where(full, 0, leaf), total),
        )

    return optax.GradientTransformation(init, update)


def norm_of(total: Any) -> Any:
    leaves = jax.tree.leaves(total)
    groups = [leaves[start : start + 10] for start in range(0, len(leaves), 10)]
    return jnp.sqrt(
        jnp.stack(
            [jnp.sum(sum(jnp.square(leaf) for leaf in group)) for group in groups]
        ).sum()
    )


def finite(total: Any) -> Any:
    """Look at 16 tensors in one kernel: one kernel for each takes XLA ten times as
    long.
    """
    leaves = jax.tree.leaves(total)
    groups = [leaves[start : start + 16] for start in range(0, len(leaves), 16)]
    return jnp.isfinite(
        jnp.stack([jnp.sum(sum(0 * leaf for leaf in group)) for group in groups]).sum()
    )


def compiled(tx: Any, params: Any) -> object:
    def step(params: Any, state: Any, gradients: Any) -> Any:
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    return (
        jax.jit(step, donate_argnums=(0, 1))
        .lower(params, jax.eval_shape(tx.init, params), params)
        .compile()
    )
