"""The program that XLA gets: control flow runs the inner optimizer once per window, and the state keeps its types."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import gradaccum
import gradaccum_jax


def test_step_outside_jit_compiles_once() -> None:
    traces: list[int] = []

    def update(gradients: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        traces.append(1)
        return gradients, state

    tx = gradaccum.wrap(optax.GradientTransformation(lambda params: optax.EmptyState(), update), steps=2)
    params = jnp.ones(3)
    _, state = tx.update(params, tx.init(params), params)
    after_first = len(traces)
    for _ in range(5):
        _, state = tx.update(params, state, params)
    assert len(traces) == after_first > 0


@pytest.mark.parametrize("options", [{}, {"on_overflow": "drop_micro_batch", "loss_scale": 8}, {"steps": [(0, 2), (1, 3)]}])
@pytest.mark.parametrize("weight", [None, 2.0])
def test_state_types_hold_still(options: dict[str, Any], weight: float | None) -> None:
    tx = gradaccum.wrap(optax.inject_hyperparams(optax.adamw)(learning_rate=0.1), **{"steps": 2, **options})
    params = {"w": jnp.ones((2, 3)), "half": jnp.ones(2, jnp.bfloat16), "scalar": 1.0}
    start = tx.init(params)
    kinds = jax.tree.map(jax.typeof, start)
    for kind in jax.tree.leaves(kinds):
        assert not kind.weak_type
    grads = {"w": jnp.ones((2, 3)), "half": jnp.ones(2, jnp.bfloat16), "scalar": 2.0}
    for step in (
        lambda: tx.update(grads, start, params, weight=weight)[1],
        lambda: gradaccum_jax.flush(tx, start, params)[1],
        lambda: gradaccum_jax.discard(tx, start),
    ):
        assert jax.tree.map(jax.typeof, step()) == kinds


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
