"""A compiled step grows linearly with the number of tensors, not with its square. A model has hundreds of norms and biases."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("optax", reason="optax is not installed")
import jax
import jax.numpy as jnp
import optax

import gradaccum
import gradaccum_jax

FEW, MANY = 20, 60
UNTUNED = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
"""Skip LLVM's optimizations: XLA's optimized program is the same to the letter, and compiled in a fifth of the time."""
MAKERS: dict[str, tuple[Callable[[Any], Any], float]] = {
    "plain": (lambda inner: gradaccum.wrap(inner, steps=4), 3.0),
    "clipping": (lambda inner: gradaccum.wrap(inner, steps=4, clip_norm=1.0), 3.0),
    "dropping": (lambda inner: gradaccum.wrap(inner, steps=4, on_overflow="drop_micro_batch"), 3.7),
    "multisteps": (lambda inner: gradaccum_jax.MultiSteps(inner, 4), 1.5),
}
"""Each wrapper, and its most lines of program for a further tensor, as a multiple of those of `optax.MultiSteps`."""


def lines(tx: Any, tensors: int, members: int = 0) -> int:
    """Count the lines of the optimized program of a step."""
    shape = (members, 32) if members else (32,)
    params = {f"w{index}": jax.ShapeDtypeStruct(shape, jnp.float32) for index in range(tensors)}

    def step(params: Any, state: Any) -> Any:
        updates, state = tx.update(params, state, params)
        return optax.apply_updates(params, updates), state

    whole, init = (jax.vmap(step), jax.vmap(tx.init)) if members else (step, tx.init)
    return len(jax.jit(whole).lower(params, jax.eval_shape(init, params)).compile(compiler_options=UNTUNED).as_text().splitlines())


def lines_of_each(tx: Any) -> float:
    """Count the lines for a further tensor."""
    return (lines(tx, MANY) - lines(tx, FEW)) / (MANY - FEW)


@functools.cache
def lines_in_optax() -> float:
    return lines_of_each(optax.MultiSteps(optax.sgd(0.1), 4))


@pytest.mark.parametrize("name", MAKERS)
def test_lines_per_tensor(name: str) -> None:
    make, most = MAKERS[name]
    assert lines_of_each(make(optax.sgd(0.1))) <= most * lines_in_optax()


@pytest.mark.parametrize("name", ["clipping", pytest.param("dropping", marks=pytest.mark.deep)])
def test_ensemble_lines_per_tensor(name: str) -> None:
    tx = MAKERS[name][0](optax.sgd(0.1))
    small, middle, large = (lines(tx, count, members=3) for count in (10, 20, 30))
    assert large - middle <= 1.05 * (middle - small)
