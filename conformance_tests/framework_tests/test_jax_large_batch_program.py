"""The program of a large batch: its scratch, its loops, how often it is compiled, and
its collectives on several devices.
"""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import gradaccum
import gradaccum_jax

WIDTH, SIZE = 512, 8
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


def test_scratch_is_that_of_one_micro_batch() -> None:
    """From 1 to 256 micro-batches of 8: activations of one, and at most the gradients
    of one beside the sum, which is the result.
    """
    sizes = {count: scratch(compiled(count * SIZE)) for count in (1, 4, 32, 256)}
    activations = 4 * SIZE * WIDTH * 4
    assert sizes[256] - sizes[4] <= 8 * 256
    assert sizes[256] <= sizes[1] + OWN + activations
    # What the large batch would want.
    assert (
        scratch(compiled(256 * SIZE, jax.value_and_grad(loss)))
        > 8 * activations + sizes[1]
    )


def test_one_body_for_each_size() -> None:
    """The matrix products of one micro-batch, however many there are; twice as many
    with a smaller last one.
    """

    def products(items: int) -> int:
        return len(
            re.findall(
                r" (?:dot|custom-call)\(.*(?:dot|matmul)|= \S+ dot\(",
                compiled(items).as_text(),
            )
        )

    once = products(4 * SIZE)
    assert once > 0
    assert products(64 * SIZE) == once
    assert products(64 * SIZE + 3) == 2 * once


def test_batch_is_not_copied() -> None:
    """Nor is a sum; only the zeros that two equal ones start from are, once, before the
    loop.
    """
    text = compiled(40 * SIZE).as_text()
    assert (
        re.findall(
            rf"f32\[{40 * SIZE},{WIDTH}\]\S* (?:copy|transpose|reshape|gather)\(", text
        )
        == []
    )
    assert len(re.findall(rf"= f32\[{WIDTH},{WIDTH}\]\S* copy\(", text)) <= 1


def test_repeated_calls_compile_once() -> None:
    """A bare call is jitted: the loss is traced again for another shape only."""
    traced: list[Any] = []

    def noted(params: Any, x: Any) -> Any:
        traced.append(x.shape)
        return jnp.mean(params * x)

    step = gradaccum_jax.value_and_grad(noted, steps=4)
    for _ in range(3):
        step(jnp.ones(()), np.ones(8))
    seen = len(traced)
    step(jnp.ones(()), np.ones(8))
    assert len(traced) == seen
    step(jnp.ones(()), np.ones(16))
    assert len(traced) > seen
    assert set(traced) == {(2,), (4,)}


def test_window_works_in_place() -> None:
    """Parameters and state are donated: one sum, no second one, and every buffer taken
    over.
    """
    tx = gradaccum.wrap(optax.adam(1e-3), steps=None)
    call = gradaccum_jax.value_and_update(loss, tx, micro_batch_size=SIZE)

    def step(params: Any, state: Any, x: Any) -> Any:
        _, updates, state = call(params, state, x)
        return optax.apply_updates(params, updates), state

    def made(count: int) -> Any:
        given = jax.ShapeDtypeStruct((count * SIZE, WIDTH), jnp.float32)
        lowered = jax.jit(step, donate_argnums=(0, 1)).lower(
            PARAMS, jax.eval_shape(tx.init, PARAMS), given
        )
        return lowered.compile(compiler_options=UNTUNED)

    few, many = made(4), made(64)
    assert scratch(many) - scratch(few) <= 8 * 64
    assert scratch(many) <= 1.1 * OWN
    assert many.memory_analysis().alias_size_in_bytes >= 4 * OWN
