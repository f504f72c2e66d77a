"""The contents of a compiled step, counted and not timed."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.contestants.jax_mlp import STEPS, Compiled

MakeOptimizer = Callable[[Any], Any]
"""From the inner optimizer, of optax, what accumulates for it."""


def counts(compiled: Compiled, make: MakeOptimizer) -> dict[str, float]:
    """All counts of a step whose transformation is ``make(inner)``."""
    return sizes(compiled) | {"updates per window": updates_per_window(make)}


def sizes(compiled: Compiled) -> dict[str, float]:
    """Bytes in multiples of the parameters' own, and copies of arrays of a parameter's
    shape.
    """
    leaves = jax.tree.leaves(compiled.params)
    own = sum(leaf.nbytes for leaf in leaves)
    memory = compiled.step.memory_analysis()
    in_and_out = (
        memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes
    )
    return {
        "temp / params": memory.temp_size_in_bytes / own,
        "held / params": in_and_out / own,
        "copies": copies(compiled.step.as_text(), {leaf.shape for leaf in leaves}),
    }


def copies(hlo: str, shapes: set[tuple[int, ...]]) -> int:
    """Copies of float32 arrays of those shapes in an optimized program."""
    texts = "|".join(",".join(map(str, shape)) for shape in shapes)
    return len(re.findall(rf"= f32\[(?:{texts})\]\S* copy\(", hlo))


def updates_per_window(make: MakeOptimizer) -> int:
    """Runs of the inner optimizer in one window, noted on the host as they happen."""
    runs: list[int] = []
    tx = make(noting(runs))
    params = jnp.ones(2)
    state = tx.init(params)
    step = jax.jit(tx.update)
    for _ in range(STEPS):
        updates, state = step(params, state, params)
        jax.block_until_ready((updates, state))  # type: ignore[no-untyped-call]
    return len(runs)


def noting(runs: list[int]) -> optax.GradientTransformation:
    """SGD that appends to `runs` whenever it runs."""

    def note(gradient: Any) -> Any:
        runs.append(1)
        return np.zeros(np.shape(gradient), np.float32)

    def update(gradients: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        kind = jax.eval_shape(jnp.negative, gradients)
        zeros = jax.pure_callback(note, kind, gradients, vmap_method="expand_dims")
        return zeros - gradients, state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)
