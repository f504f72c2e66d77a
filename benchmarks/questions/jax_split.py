"""JAX, float32: the gradient of a large batch from 8 micro-batches in one program,
beside `optax.microbatch`, a scan by hand and the floor.

The floor is 8 jitted gradients, each waited for and forgotten: nothing is added up.
Beside it stands the floor with one addition per gradient, in place. Everything runs on
one core.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax

import gradaccum_jax
from benchmarks.case import Case, Curve
from benchmarks.contestants.jax_mlp import (
    ITEMS,
    STEPS,
    Window,
    batches,
    loss,
    make_params,
    wait,
)
from benchmarks.triad import one_core

BASELINE = "optax.microbatch"
FLOOR = f"floor: {STEPS} gradients, nothing added"
ADDED = "floor, and one addition each"
SCAN = "hand-written scan"
WIDTHS = {"4 x 256^2": 256, "4 x 1024^2": 1024}
LENGTHS = (1, 4, 16, 64, 256)
QUICK_LENGTHS = (1, 16)

ValueAndGrad = Callable[[Any, Any], tuple[Any, Any]]


def cases(quick: bool) -> Iterator[Case | Curve]:
    one_core()
    for name, width in WIDTHS.items():
        yield splitting(name, width)
    yield from temporaries(64, QUICK_LENGTHS if quick else LENGTHS)


def splitting(name: str, width: int) -> Case:
    """Everyone, on the same large batch."""
    params, x = make_params(width), jnp.concatenate(batches(width))
    programs = {
        label: jax.jit(way).lower(params, x).compile() for label, way in ways().items()
    }
    windows: dict[str, Window] = {
        label: _window(program, params, x) for label, program in programs.items()
    }
    windows[FLOOR], windows[ADDED] = (
        _floor(params, batches(width)),
        _added(params, batches(width)),
    )
    own = sum(leaf.nbytes for leaf in params)
    return Case(
        name,
        BASELINE,
        windows,
        {
            label: {"temp / params": _temp(program) / own}
            for label, program in programs.items()
        },
    )


def ways() -> dict[str, ValueAndGrad]:
    """From parameters and the large batch to loss and gradient."""
    microbatching = {
        "argnums": 1,
        "microbatch_size": ITEMS,
        "accumulator": optax.microbatching.AccumulationType.MEAN,
    }
    return {
        BASELINE: optax.microbatch(jax.value_and_grad(loss), **microbatching),
        "gradaccum": gradaccum_jax.value_and_grad(loss, micro_batch_size=ITEMS),
        SCAN: _scanned,
        "large batch in one pass": jax.value_and_grad(loss),
    }


def temporaries(width: int, lengths: tuple[int, ...]) -> Iterator[Curve]:
    """Temporary bytes as the batch grows, in micro-batches of the same size."""
    params, found = make_params(width), list[float]()
    for n in lengths:
        program = (
            jax.jit(gradaccum_jax.value_and_grad(loss, micro_batch_size=ITEMS))
            .lower(params, jnp.zeros((n * ITEMS, width)))
            .compile()
        )
        found.append(_temp(program) / 2**10)
    xs = [float(n) for n in lengths]
    yield Curve(
        "temporaries of one call",
        "gradaccum",
        xs,
        found,
        "micro-batches",
        "KiB",
        {"largest": max(found), "smallest": min(found)},
    )


def _scanned(params: Any, x: Any) -> tuple[Any, Any]:
    def add(total: Any, part: Any) -> tuple[Any, None]:
        return jax.tree.map(
            jnp.add, total, jax.value_and_grad(loss)(params, part)
        ), None

    zeros = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, params))
    total, _ = jax.lax.scan(add, zeros, x.reshape(STEPS, ITEMS, -1))
    return jax.tree.map(lambda leaf: leaf / STEPS, total)  # type: ignore[no-any-return]


def _window(program: Any, params: Any, x: Any) -> Window:
    return lambda: wait(program(params, x))


def _floor(params: Any, xs: list[Any]) -> Window:
    take = jax.jit(jax.value_and_grad(loss))

    def run() -> Any:
        for x in xs:
            last = wait(take(params, x))
        return last

    return run


def _added(params: Any, xs: list[Any]) -> Window:
    take = jax.jit(jax.value_and_grad(loss))
    add = jax.jit(
        lambda total, part: jax.tree.map(jnp.add, total, part), donate_argnums=0
    )

    def run() -> Any:
        total = jax.tree.map(jnp.zeros_like, params)
        for x in xs:
            total = add(total, wait(take(params, x))[1])
        return wait(total)

    return run


def _temp(program: Any) -> int:
    return int(program.memory_analysis().temp_size_in_bytes)
