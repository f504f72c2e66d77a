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

SIDE, MATRICES, MEMBERS = 1024, 4, 3
OWN = MATRICES * SIDE * SIDE * 4
UNTUNED = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
}
"""Skip LLVM's optimizations. They come after XLA's, whose program and buffers are all
that is counted here.
"""
KERNELS = {
    "plain": 12.75,
    "clip_and_drop": 15.75,
    "dynamic_scale": 12.75,
    "no_steps": 3,
    "multisteps": 6,
}
"""The most kernels for each tensor. AdamW and the end of the window take six or seven,
the sum takes one, the norm takes two or three, and the norm of scaled numbers as many
again. JAX 0.7 needs a quarter of one more to keep the norm's total out of every other
kernel.
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
CLIP_AND_DROP = {"clip_norm": 1.0, "on_overflow": "drop_micro_batch"}
MAKERS = {
    "plain": lambda inner: gradaccum.wrap(inner, steps=4),
    "clip_and_drop": lambda inner: gradaccum.wrap(inner, steps=4, **CLIP_AND_DROP),
    "dynamic_scale": lambda inner: gradaccum.wrap(
        inner, steps=4, clip_norm=1.0, loss_scale=gradaccum.DynamicLossScale()
    ),
    "no_steps": lambda inner: gradaccum.wrap(inner, steps=None),
    "multisteps": lambda inner: gradaccum_jax.MultiSteps(inner, 4),
}
BRANCHES = {
    "plain": 4,
    "clip_and_drop": 4,
    "dynamic_scale": 4,
    "no_steps": 1,
    "multisteps": 1,
}
"""The conditionals: for the end of the window, for the norm of numbers too large or too
small to be squared, for the division, for the inner optimizer.
"""


def params(members: int = 0, matrices: int = MATRICES) -> dict[str, Any]:
    shape = (members, SIDE // 4, SIDE // 4) if members else (SIDE, SIDE)
    return {f"w{i}": jax.ShapeDtypeStruct(shape, jnp.float32) for i in range(matrices)}


def compiled(
    tx: Any, *, members: int = 0, trained: bool = False, matrices: int = MATRICES
) -> tuple[Any, str]:
    """Compile a step, and return it with its optimized program. The step takes
    gradients, or with `trained` the network's input.
    """

    def gradient(params: Any, x: Any) -> Any:
        def loss(params: Any) -> Any:
            y = x
            for w in params.values():
                y = jnp.tanh(y @ w)
            return jnp.mean(y * y)

        return jax.grad(loss)(params)

    def step(params: Any, state: Any, given: Any) -> Any:
        updates, state = tx.update(
            gradient(params, given) if trained else given, state, params
        )
        return optax.apply_updates(params, updates), state

    whole, init = (jax.vmap(step), jax.vmap(tx.init)) if members else (step, tx.init)
    held = params(members, matrices)
    given = jax.ShapeDtypeStruct((2, SIDE), jnp.float32) if trained else held
    made = (
        jax.jit(whole, donate_argnums=(0, 1))
        .lower(held, jax.eval_shape(init, held), given)
        .compile(compiler_options=UNTUNED)
    )
    return made, made.as_text()


@functools.cache
def step_of(
    name: str, *, members: int = 0, trained: bool = False, matrices: int = MATRICES
) -> tuple[Any, Any, str]:
    """Return the wrapped AdamW, its compiled step and the program. Several tests read
    the same one.
    """
    tx = MAKERS[name](optax.adamw(1e-3))
    return tx, *compiled(tx, members=members, trained=trained, matrices=matrices)


def copies(text: str, side: int = SIDE) -> list[str]:
    return re.findall(rf"= f32\[(?:\d+,)?{side},{side}\]\S* copy\(.*", text)


def kernels(text: str) -> int:
    """Count the kernels that the program calls: fusions, library calls and copies, but
    not the operations fused into them.
    """
    fused = set(re.findall(r"(?:calls|to_apply)=%([\w.-]+)", text)) - set(
        re.findall(r"%(parallel[\w.-]+)", text)
    )
    bodies = [
        part
        for part in re.split(r"\n\n", text)
        if re.sub(r"^(ENTRY )?%([\w.-]+).*", r"\2", part, flags=re.S) not in fused
    ]
    return sum(
        len(
            re.findall(
                r"= \S+ (?:fusion|dot|reduce|reduce-window|multiply|is-finite|copy)\(",
                body,
            )
        )
        for body in bodies
    )


def aliased(text: str) -> int:
    """Count the outputs that take the memory of an input."""
    return len(re.findall(r"\{\d+\}: \(\d+, \{\}, \w+-alias\)", text.splitlines()[0]))


@pytest.mark.parametrize("name", MAKERS)
def test_step_works_in_place(name: str) -> None:
    tx, made, text = step_of(name)
    memory = made.memory_analysis()
    assert copies(text) == []
    assert memory.temp_size_in_bytes <= 0.26 * OWN  # the squares of one array
    assert memory.alias_size_in_bytes >= 4 * OWN  # Parameters, sums and both moments.
    donated = len(jax.tree.leaves((params(), jax.eval_shape(tx.init, params()))))
    # Three flags of the last event, and the terms of the window: never read, only
    # written.
    unread = 4 * (name != "multisteps")
    assert aliased(text) == donated - unread
    assert memory.argument_size_in_bytes < 5.001 * OWN


@pytest.mark.parametrize("name", MAKERS)
def test_step_stays_on_the_device(name: str) -> None:
    """The decisions are branches on the device: the program has no loop, no collective
    and no transfer to the host.
    """
    _, _, text = step_of(name)
    assert (text.count(" conditional("), text.count(" while(")) == (BRANCHES[name], 0)
    assert [word for word in OUTSIDE if word in text] == []


@pytest.mark.parametrize("name", MAKERS)
def test_scratch_with_gradient_is_that_of_the_step(name: str) -> None:
    """XLA compiles the step together with the gradient, and adds each matrix of the
    gradient as it comes.

    Where a micro-batch may be dropped, the last gradient must be finite before the
    first is added.
    """
    _, made, text = step_of(name, trained=True)
    mask = SIDE * SIDE  # of one matrix
    scratch = {
        "no_steps": OWN // 2,
        "multisteps": OWN // 2,
        "clip_and_drop": OWN + mask,
    }.get(name, OWN)
    assert copies(text) == []
    assert made.memory_analysis().temp_size_in_bytes <= scratch + 2**18


@pytest.mark.parametrize("name", MAKERS)
def test_kernels_per_further_tensor(name: str) -> None:
    """XLA spends its compile time on kernels. `optax.MultiSteps` has 7 or 8 for each
    tensor.
    """
    few, many = (
        kernels(program)
        for _, _, program in (step_of(name), step_of(name, matrices=2 * MATRICES))
    )
    assert 2 <= (many - few) / MATRICES <= KERNELS[name]


def test_sum_is_no_lone_addition() -> None:
    """XLA on the CPU, in JAX 0.7 at least, adds one element at a time where a kernel is
    a lone in-place addition.
    """
    _, text = compiled(gradaccum.wrap(optax.sgd(1.0), steps=4), trained=True)
    kernels = [
        part
        for part in re.split(r"\n\n", text)
        if not re.match(r"%(fused|wrapped)_", part)
    ]
    assert kernels
    assert [
        kernel
        for kernel in kernels
        if re.search(rf"f32\[{SIDE},{SIDE}\]\S* add\(", kernel)
    ] == []


@pytest.mark.parametrize("name", MAKERS)
def test_ensemble_works_in_place(name: str) -> None:
    _, made, text = step_of(name, members=MEMBERS)
    memory, own = made.memory_analysis(), OWN // 16 * MEMBERS
    assert copies(text, SIDE // 4) == []
    # One member's parameters, sums and moments, and its divided gradient.
    assert memory.temp_size_in_bytes <= 5.01 / MEMBERS * own
    assert memory.alias_size_in_bytes >= 4 * own
    assert [word for word in OUTSIDE if word in text] == []
