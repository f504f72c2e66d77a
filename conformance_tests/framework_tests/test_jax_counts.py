"""Counts of a compiled step that hold on any machine: it makes no copies, needs little
scratch, and never asks the host.
"""

from __future__ import annotations

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import gradaccum
import gradaccum_jax

SIDE = 1024
MATRICES = 4
OWN = MATRICES * SIDE * SIDE * 4
UNTUNED = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
}
"""Skip LLVM's optimizations. They come after XLA's, whose program and buffers are all
that is counted here.
"""
OUTSIDE = (
    "all-reduce",
    "all-gather",
    "all-to-all",
    "reduce-scatter",
    "collective",
    "infeed",
    "outfeed",
    "send(",
    "recv(",
    "callback",
)
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {"steps": 4},
    "clip_and_drop": {
        "steps": 4,
        "clip_norm": 1.0,
        "on_overflow": "drop_micro_batch",
        "loss_scale": gradaccum.DynamicLossScale(),
    },
    "no_steps": {"steps": None},
}
by_case = pytest.mark.parametrize("name", [*OPTIONS, "multisteps"])
BRANCHES = {"plain": 4, "clip_and_drop": 4, "no_steps": 4, "multisteps": 1}
"""The conditionals: for the end of the window, for the norm of numbers too large or too
small to be squared, for the division, for the inner optimizer.
"""


@functools.cache
def step_of(
    name: str, inner: Any = optax.adamw, *, trained: bool = False
) -> tuple[Any, Any, str]:
    """A compiled step with parameters and state donated, all that these hold, and the
    optimized program. The step takes gradients, or with `trained` a network's input.
    """
    given = inner(1e-3)
    tx = (
        gradaccum_jax.MultiSteps(given, 4)
        if name == "multisteps"
        else gradaccum.wrap(given, **OPTIONS[name])
    )
    matrix = jax.ShapeDtypeStruct((SIDE, SIDE), jnp.float32)
    params = {f"w{i}": matrix for i in range(MATRICES)}

    def loss(params: Any, x: Any) -> Any:
        for w in params.values():
            x = jnp.tanh(x @ w)
        return jnp.mean(x * x)

    def step(params: Any, state: Any, given: Any) -> Any:
        grads = jax.grad(loss)(params, given) if trained else given
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    state = jax.eval_shape(tx.init, params)
    x = jax.ShapeDtypeStruct((2, SIDE), jnp.float32)
    lowered = jax.jit(step, donate_argnums=(0, 1)).lower(
        params, state, x if trained else params
    )
    made = lowered.compile(compiler_options=UNTUNED)
    return made, (params, state), made.as_text()


def copies(text: str) -> list[str]:
    return re.findall(rf"= f32\[{SIDE},{SIDE}\]\S* copy\(.*", text)


@by_case
def test_step_works_in_place(name: str) -> None:
    """And stays on the device: its decisions are branches there, without a loop."""
    made, held, text = step_of(name)
    memory = made.memory_analysis()
    assert copies(text) == []
    assert memory.temp_size_in_bytes <= 0.26 * OWN  # the squares of one array
    assert memory.alias_size_in_bytes >= 4 * OWN  # parameters, sums and both moments
    assert memory.argument_size_in_bytes < 5.001 * OWN
    taken_over = re.findall(r"\{\d+\}: \(\d+, \{\}, \w+-alias\)", text.splitlines()[0])
    # Three flags of the last event, and the terms of the window: never read, only
    # written.
    unread = 4 * (name != "multisteps")
    assert len(taken_over) == len(jax.tree.leaves(held)) - unread
    assert text.count(" conditional(") == BRANCHES[name]
    assert text.count(" while(") == 0
    assert [word for word in OUTSIDE if word in text] == []


def test_small_arrays_share_kernels() -> None:
    """XLA compiles each sum of squares and each conditional: ten arrays share a sum, and
    one conditional less is left. A micro-batch selects twice in each array.
    """
    tx = gradaccum.wrap(optax.sgd(0.1), steps=4)
    params = [jnp.ones(64)] * 21
    text = jax.jit(tx.update).lower(params, tx.init(params), params).as_text()
    assert text.count("stablehlo.case") == 3
    assert text.count("stablehlo.reduce(") == 8
    assert len(re.findall("stablehlo.select .*tensor<64xf32>", text)) == 3 * 21


@by_case
def test_scratch_with_gradient_is_that_of_the_step(name: str) -> None:
    """XLA compiles the step together with the gradient, and adds each matrix of the
    gradient as it comes.

    Where a micro-batch may be dropped, the last gradient must be finite before the
    first is added.
    """
    made, _, text = step_of(name, trained=True)
    scratch = {
        "plain": OWN,
        "clip_and_drop": OWN + SIDE * SIDE,  # the mask of one matrix
        "no_steps": OWN // 2,
        "multisteps": OWN // 2,
    }[name]
    assert copies(text) == []
    assert made.memory_analysis().temp_size_in_bytes <= scratch + 2**18
