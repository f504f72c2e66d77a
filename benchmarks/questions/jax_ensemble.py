"""JAX, AdamW: a window of an ensemble, its members trained by one step under
`jax.vmap`.

Under vmap a `lax.cond` becomes both of its branches and a select, and so runs the inner
optimizer in every micro-batch. Ours has a batching rule of its own: it updates all
members at once where their windows end together, as they do here, and otherwise those
that end, one by one. "updates per window" counts runs of the inner optimizer, one for
all members being one. One copy is the gradient's own.
"""

from __future__ import annotations

from collections.abc import Iterator

import optax

import gradaccum
import gradaccum_jax
from benchmarks.case import Case
from benchmarks.contestants.jax_mlp import (
    STEPS,
    Window,
    adamw,
    batches,
    compile_step,
    make_params,
    window,
)
from benchmarks.contestants.jax_peers import by_hand, floor
from benchmarks.jax_counts import MakeOptimizer, counts
from benchmarks.triad import one_core

BASELINE = "optax.MultiSteps"
FLOOR = f"floor: {STEPS} gradients, 1 update"
MEMBERS = 4
SIZES = {"4 x 256^2": 256, "4 x 512^2": 512, "4 x 1024^2": 1024}

OPTIMIZERS: dict[str, MakeOptimizer] = {
    BASELINE: lambda inner: optax.MultiSteps(inner, STEPS),
    "gradaccum": lambda inner: gradaccum.wrap(inner, steps=STEPS),
    "gradaccum_jax.MultiSteps": lambda inner: gradaccum_jax.MultiSteps(inner, STEPS),
}


def cases(quick: bool) -> Iterator[Case]:
    one_core()
    for name, width in list(SIZES.items())[: 2 if quick else None]:
        yield ensemble(f"{MEMBERS} members of {name}", width)


def ensemble(name: str, width: int) -> Case:
    """Every member has parameters of its own and sees the same micro-batches."""
    windows: dict[str, Window] = {}
    counted: dict[str, dict[str, float]] = {}
    for label, make in OPTIMIZERS.items():
        step = compile_step(
            make(adamw()),
            make_params(width, MEMBERS),
            batches(width)[0],
            members=MEMBERS,
        )
        windows[label], counted[label] = (
            window(step, batches(width)),
            counts(step, make, MEMBERS),
        )
    return Case(
        name,
        BASELINE,
        {
            **windows,
            "hand-written": by_hand(width, MEMBERS),
            FLOOR: floor(width, MEMBERS),
        },
        counted,
    )
