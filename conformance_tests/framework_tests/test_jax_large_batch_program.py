"""The program of a large batch: its scratch, its loops, and how often it is compiled."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import gradaccum
import gradaccum_jax

WIDTH = 512
SIZE = 8
PARAMS = {
    name: jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32) for name in ("a", "b")
}
OWN = 2 * WIDTH * WIDTH * 4
UNTUNED = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
}
"""Skip LLVM's optimizations: they come after XLA's, whose program and buffers are all
that is counted here.
"""


def loss(params: Any, x: Any) -> Any:
    return jnp.mean(jnp.tanh(jnp.tanh(x @ params["a"]) @ params["b"]) ** 2)


def compiled(items: int, step: Any = None) -> Any:
    step = step or gradaccum_jax.value_and_grad(loss, micro_batch_size=SIZE)
    given = jax.ShapeDtypeStruct((items, WIDTH), jnp.float32)
    return jax.jit(step).lower(PARAMS, given).compile(compiler_options=UNTUNED)


def scratch(made: Any) -> int:
    return int(made.memory_analysis().temp_size_in_bytes)


def test_program_is_that_of_one_micro_batch() -> None:
    """From 1 to 256 micro-batches of 8: the activations of one, and at most its
    gradients beside the sum, which is the result; and the matrix products of one, twice
    as many with a smaller last one. Number, loss and weight take 12 bytes each.
    """
    made = {items: compiled(items) for items in (8, 32, 2048, 2051)}
    activations = 4 * SIZE * WIDTH * 4
    one = scratch(made[8])
    assert scratch(made[2048]) - scratch(made[32]) <= 12 * 256
    assert scratch(made[2048]) <= one + OWN + activations
    # What the large batch would want.
    assert scratch(compiled(2048, jax.value_and_grad(loss))) > 8 * activations + one
    texts = {items: program.as_text() for items, program in made.items()}
    product = r" (?:dot|custom-call)\(.*(?:dot|matmul)|= \S+ dot\("
    once, more, ragged = (
        len(re.findall(product, texts[items])) for items in (32, 2048, 2051)
    )
    assert 0 < once == more == ragged / 2
    # Neither the batch nor a sum is copied; only the zeros that two equal sums start
    # from are, once, before the loop.
    copied = rf"f32\[2048,{WIDTH}\]\S* (?:copy|transpose|reshape|gather)\("
    assert re.findall(copied, texts[2048]) == []
    assert len(re.findall(rf"= f32\[{WIDTH},{WIDTH}\]\S* copy\(", texts[2048])) <= 1


def test_repeated_calls_compile_once() -> None:
    """A bare call is jitted: the loss is traced again for another shape only."""
    traced = []

    def noted(params, x):
        traced.append(x.shape)
        return jnp.mean(params * x)

    step = gradaccum_jax.value_and_grad(noted, steps=4)
    step(jnp.ones(()), np.ones(8))
    seen = len(traced)
    step(jnp.ones(()), np.ones(8))
    assert len(traced) == seen
    step(jnp.ones(()), np.ones(16))
    assert set(traced) == {(2,), (4,)}


def test_window_works_in_place() -> None:
    """Parameters and state are donated: one sum, no second one, and every buffer taken
    over.
    """
    tx = gradaccum.wrap(optax.adam(1e-3), steps=None)
    call = gradaccum_jax.value_and_update(loss, tx, micro_batch_size=SIZE)

    def step(params, state, x):
        _, updates, state = call(params, state, x)
        return optax.apply_updates(params, updates), state

    made = (
        jax.jit(step, donate_argnums=(0, 1))
        .lower(
            PARAMS,
            jax.eval_shape(tx.init, PARAMS),
            jax.ShapeDtypeStruct((64 * SIZE, WIDTH), jnp.float32),
        )
        .compile(compiler_options=UNTUNED)
    )
    assert scratch(made) <= 1.1 * OWN
    assert made.memory_analysis().alias_size_in_bytes >= 4 * OWN
