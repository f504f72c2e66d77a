"""JAX: how near a micro-batch in mid-window comes to the speed of memory, beside
NumPy's triad; jitted, state and parameters donated.

Gradients are an input, so that nothing is left of a micro-batch but what is asked
about. Counted is what the addition must move. A compiled step is one program for every
micro-batch, so that it also selects what is kept of the sum and adds an update, zeros
in mid-window, to the parameters. Where both are in place, and the compiler takes the
selects out of its loops, nothing is moved for that. With ``steps=None`` no window can
end in the step, and the addition is all that is left of it. Everything runs on one
core.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax

import gradaccum
from benchmarks import triad
from benchmarks.case import Case

OWN_TRIAD = "jitted b + s * c"
OWN_ADDITION = "jitted addition"
MANY = 2**30
"""Steps of a window that does not end while it is measured."""


def cases(quick: bool) -> Iterator[Case]:
    triad.one_core()
    kinds = ((jnp.float32, triad.FLOAT32), (jnp.bfloat16, triad.moved(4, 2, 4)))
    for dtype, moved in kinds[: 1 if quick else None]:
        name = jnp.dtype(dtype).name
        contestants = {
            OWN_ADDITION: _addition(dtype),
            "gradaccum": _whole_step(gradaccum.wrap(optax.sgd(0.1), steps=MANY), dtype),
            "gradaccum, steps=None": _sum_alone(
                gradaccum.wrap(optax.sgd(0.1), steps=None), dtype
            ),
        }
        bytes_moved = (
            triad.YARDSTICKS
            | {OWN_TRIAD: triad.FLOAT32}
            | dict.fromkeys(contestants, moved)
        )
        own = {**triad.yardsticks(), OWN_TRIAD: _own_triad()}
        yield Case(
            f"{name} gradients, float32 sums and parameters",
            triad.NAME,
            own | contestants,
            rates=triad.rates(bytes_moved),
        )


def _tree(value: float, dtype: Any = jnp.float32) -> list[Any]:
    return [jnp.full(triad.SHAPE, value, dtype) for _ in range(triad.TENSORS)]


def _own_triad() -> Callable[[], object]:
    # `a` is given up for the result, so that no fresh memory is asked for.
    step = jax.jit(
        lambda a, b, c: (b + triad.SCALE * c,), donate_argnums=0, keep_unused=True
    )
    b, c = (jnp.full(triad.ELEMENTS, value) for value in (1.0, 2.0))
    return _carried(step, jnp.zeros(triad.ELEMENTS), rest=(b, c))


def _addition(dtype: Any) -> Callable[[], object]:
    step = jax.jit(
        lambda total, gradients: (jax.tree.map(jnp.add, total, gradients),),
        donate_argnums=0,
    )
    return _carried(step, _tree(0.0), rest=(_tree(triad.GRADIENT, dtype),))


def _whole_step(tx: Any, dtype: Any) -> Callable[[], object]:
    def step(params: Any, state: Any, gradients: Any) -> tuple[Any, ...]:
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    params = _tree(1.0)
    return _carried(
        jax.jit(step, donate_argnums=(0, 1)),
        params,
        tx.init(params),
        rest=(_tree(triad.GRADIENT, dtype),),
    )


def _sum_alone(tx: Any, dtype: Any) -> Callable[[], object]:
    step = jax.jit(
        lambda state, gradients: (tx.update(gradients, state)[1],), donate_argnums=0
    )
    return _carried(step, tx.init(_tree(1.0)), rest=(_tree(triad.GRADIENT, dtype),))


def _carried(step: Any, *first: Any, rest: tuple[Any, ...]) -> Callable[[], object]:
    """Each run works on what the last one returned."""
    carried = list(first)

    def run() -> object:
        carried[:] = step(*carried, *rest)
        return jax.block_until_ready(carried)  # type: ignore[no-untyped-call]

    return run
