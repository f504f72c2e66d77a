"""The program that XLA gets: control flow runs the inner optimizer once per window, and
the state keeps its types.
"""

from __future__ import annotations

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

    tx = gradaccum.wrap(
        optax.GradientTransformation(lambda params: optax.EmptyState(), update), steps=2
    )
    params = jnp.ones(3)
    _, state = tx.update(params, tx.init(params), params)
    after_first = len(traces)
    for _ in range(5):
        _, state = tx.update(params, state, params)
    assert len(traces) == after_first > 0


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"on_overflow": "drop_micro_batch", "loss_scale": 8},
        {"steps": [(0, 2), (1, 3)]},
    ],
)
@pytest.mark.parametrize("weight", [None, 2.0])
def test_state_types_hold_still(options: dict[str, Any], weight: float | None) -> None:
    tx = gradaccum.wrap(
        optax.inject_hyperparams(optax.adamw)(learning_rate=0.1),
        **{"steps": 2, **options},
    )
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


UNTUNED = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
}
"""Skip LLVM's optimizations: XLA's optimized program is the same to the letter, and
compiled in a fifth of the time.
"""


def lines(tx: Any, tensors: int) -> int:
    """Count the lines of the optimized program of a step of three members."""
    params = {
        f"w{index}": jax.ShapeDtypeStruct((3, 32), jnp.float32)
        for index in range(tensors)
    }

    def step(params: Any, state: Any) -> Any:
        updates, state = tx.update(params, state, params)
        return optax.apply_updates(params, updates), state

    state = jax.eval_shape(jax.vmap(tx.init), params)
    return len(
        jax.jit(jax.vmap(step))
        .lower(params, state)
        .compile(compiler_options=UNTUNED)
        .as_text()
        .splitlines()
    )


@pytest.mark.parametrize(
    "options",
    [
        {"clip_norm": 1.0},
        pytest.param({"on_overflow": "drop_micro_batch"}, marks=pytest.mark.deep),
    ],
    ids=str,
)
def test_ensemble_lines_per_tensor(options: dict[str, Any]) -> None:
    tx = gradaccum.wrap(optax.sgd(0.1), steps=4, **options)
    small, middle, large = (lines(tx, count) for count in (10, 20, 30))
    assert large - middle <= 1.05 * (middle - small)
