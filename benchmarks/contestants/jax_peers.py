"""JAX loops by hand, in one program for the whole window, by optax's `microbatch`, and
in Keras.
"""

from __future__ import annotations

import os
from typing import Any

import jax
import jax.numpy as jnp
import optax

from benchmarks.contestants.jax_mlp import (
    ITEMS,
    STEPS,
    Compiled,
    Window,
    adamw,
    batches,
    compile_step,
    gradient,
    make_params,
    wait,
    window,
)


def floor(width: int) -> Window:
    """The work that must be done: the gradients, each waited for and forgotten, and one
    update with the last of them.

    They do not wait for one another, as those of a sum do; without waiting for each
    they would be computed side by side.
    """
    take, apply = jax.jit(gradient), _update(1)
    xs, carried = batches(width), _start(width)

    def run() -> Any:
        for x in xs:
            gradients = wait(take(carried[0], x))
        carried[:] = apply(*carried, gradients)
        return wait(carried)[0]

    return run


def by_hand(width: int) -> Window:
    """Three jitted functions: the first gradient, a gradient added in place, the
    update. Python counts.
    """
    first, apply = jax.jit(gradient), _update(STEPS)
    add = jax.jit(
        lambda total, params, x: jax.tree.map(jnp.add, total, gradient(params, x)),
        donate_argnums=0,
    )
    xs, carried = batches(width), _start(width)

    def run() -> Any:
        total = first(carried[0], xs[0])
        for x in xs[1:]:
            total = add(total, carried[0], x)
        carried[:] = apply(*carried, total)
        return wait(carried)[0]

    return run


def scanned(width: int) -> Window:
    """The whole window in one program: a scan over its micro-batches, then the update.
    It must be there as a whole, and of one length.
    """

    def mean(params: Any, xs: Any, state: Any) -> Any:
        def add(total: Any, x: Any) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, total, gradient(params, x)), None

        total, _ = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), xs)
        return jax.tree.map(lambda leaf: leaf / STEPS, total)

    xs = jnp.stack(batches(width))
    return window(compile_step(adamw(), make_params(width), xs, mean), [xs])


def microbatched(width: int) -> Window:
    """`optax.microbatch` of the gradient over the large batch, then the update; one
    program too.
    """
    mean = optax.microbatch(
        gradient,
        argnums=1,
        microbatch_size=ITEMS,
        accumulator=optax.microbatching.AccumulationType.MEAN,
    )
    x = jnp.concatenate(batches(width))
    return window(compile_step(adamw(), make_params(width), x, mean), [x])


def keras_step(width: int) -> Compiled:
    """Keras's AdamW with ``gradient_accumulation_steps``, by `stateless_apply` in a
    jitted step.

    Its defaults are those of a layer of their own: epsilon and weight decay are set to
    optax's.
    """
    os.environ["KERAS_BACKEND"] = "jax"  # read when keras is imported
    import keras

    optimizer = keras.optimizers.AdamW(
        1e-4, weight_decay=1e-4, epsilon=1e-8, gradient_accumulation_steps=STEPS
    )
    params = make_params(width)
    optimizer.build([keras.Variable(leaf) for leaf in params])

    def step(params: Any, state: Any, x: Any) -> tuple[Any, Any]:
        moved, state = optimizer.stateless_apply(state, gradient(params, x), params)
        return moved, state

    state = [jnp.array(variable.value) for variable in optimizer.variables]
    return Compiled(
        jax.jit(step, donate_argnums=(0, 1))
        .lower(params, state, batches(width)[0])
        .compile(),
        params,
        state,
    )


def _start(width: int) -> list[Any]:
    params = make_params(width)
    return [params, adamw().init(params)]


def _update(divisor: int) -> Any:
    tx = adamw()

    def update(params: Any, state: Any, total: Any) -> tuple[Any, Any]:
        updates, state = tx.update(
            jax.tree.map(lambda leaf: leaf / divisor, total), state, params
        )
        return optax.apply_updates(params, updates), state

    return jax.jit(update, donate_argnums=(0, 1))
