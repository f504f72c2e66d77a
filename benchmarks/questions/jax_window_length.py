"""JAX: time and memory by window length, at the same number of micro-batches; jitted
and donated, one program for every micro-batch.

Longer windows mean fewer updates, so the time falls and then stays: what is left is the
micro-batch. Memory is what the optimizer's state holds beside the inner optimizer's,
and what the program wants for itself while it runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax

import gradaccum
from benchmarks.axes import FEW, QUICK_WINDOWS, RUN, SMALL, WINDOWS, sizes
from benchmarks.case import Case

BASELINE = "optax.MultiSteps"
BY_HAND = "hand-written: three jitted functions"

Loop = Callable[[int], object]
"""Does so many micro-batches."""
Counts = dict[str, float]


def cases(quick: bool) -> Iterator[Case]:
    for steps in QUICK_WINDOWS[:1] if quick else WINDOWS:
        yield make_case(
            f"windows of {steps}",
            steps,
            steps=steps,
            tensors=FEW,
            elements=SMALL,
            run=RUN,
        )


def make_case(
    name: str, x: float, *, steps: int, tensors: int, elements: int, run: int
) -> Case:
    """`run` micro-batches in windows of `steps`, a divisor of it, over a model of
    `elements` in equal `tensors`.
    """
    wrapped = {
        BASELINE: optax.MultiSteps(_adamw(), steps),
        "gradaccum": gradaccum.wrap(_adamw(), steps=steps),
    }
    made = {
        label: one_program(tx, model(tensors, elements))
        for label, tx in wrapped.items()
    }
    made[BY_HAND] = by_hand(model(tensors, elements), steps)
    contestants = {label: _bound(loop, run) for label, (loop, _) in made.items()}
    counts = {label: held for label, (_, held) in made.items()}
    return Case(
        name,
        BASELINE,
        contestants,
        counts,
        x=x,
        rates={label: {"micro-batches/s": run} for label in made},
    )


def model(tensors: int, elements: int) -> list[Any]:
    """Arrays of one size."""
    keys = jax.random.split(jax.random.key(0), tensors)
    return [
        jax.random.normal(key, (size,))
        for key, size in zip(keys, sizes(tensors, elements), strict=True)
    ]


def gradient(params: Any) -> Any:
    """Of half the sum of squares of all parameters."""
    return jax.grad(lambda tree: sum(0.5 * jnp.vdot(leaf, leaf) for leaf in tree))(
        params
    )


def one_program(tx: Any, params: Any) -> tuple[Loop, Counts]:
    """What `tx` does with gradients, compiled with what makes them; and its bytes and
    seconds.
    """

    def step(params: Any, state: Any) -> tuple[Any, Any]:
        updates, state = tx.update(gradient(params), state, params)
        return optax.apply_updates(params, updates), state

    state = tx.init(params)
    begin = time.perf_counter()
    compiled = jax.jit(step, donate_argnums=(0, 1)).lower(params, state).compile()
    seconds = time.perf_counter() - begin
    held = size(state) - size(_adamw().init(params))
    memory: Any = compiled.memory_analysis()
    carried = [params, state]

    def loop(count: int) -> object:
        for _ in range(count):
            carried[:] = compiled(*carried)
        return jax.block_until_ready(carried)  # type: ignore[no-untyped-call]

    return loop, {
        "bytes held": held,
        "temporary bytes": float(memory.temp_size_in_bytes),
        "s to compile": seconds,
    }


def by_hand(params: Any, steps: int) -> tuple[Loop, Counts]:
    """The first gradient starts the sum, the others are added to it, and Python
    counts.
    """
    tx = _adamw()

    def update(params: Any, state: Any, total: Any) -> tuple[Any, Any]:
        updates, state = tx.update(
            jax.tree.map(lambda leaf: leaf / steps, total), state, params
        )
        return optax.apply_updates(params, updates), state

    start, apply = jax.jit(gradient), jax.jit(update, donate_argnums=(0, 1))
    add = jax.jit(
        lambda total, params: jax.tree.map(jnp.add, total, gradient(params)),
        donate_argnums=0,
    )
    carried, held = [params, tx.init(params)], size(params)
    total: Any = None

    def loop(count: int) -> object:
        nonlocal total
        for index in range(count):
            total = add(total, carried[0]) if index % steps else start(carried[0])
            if (index + 1) % steps == 0:
                carried[:] = apply(*carried, total)
        return jax.block_until_ready(carried)  # type: ignore[no-untyped-call]

    return loop, {"bytes held": held}


def size(tree: Any) -> float:
    """Bytes of all arrays of a tree."""
    return float(sum(leaf.nbytes for leaf in jax.tree.leaves(tree)))


def _adamw() -> Any:
    return optax.adamw(1e-4)


def _bound(loop: Loop, count: int) -> Callable[[], object]:
    return lambda: loop(count)
