"""Every optimizer of `optax` and `optax.contrib`: wrapped, it equals the bare one on the large batch, and runs once per window.

Truth is the bare optimizer on the large batch, in float64. The micro-batches' gradients are taken at the parameters as they move. Each
optimizer runs in one compiled program: both runs are scans, and the wrapped one writes down the parameters and the inner optimizer's state
after every micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

pytest.importorskip("optax", reason="optax is not installed")
import jax
import jax.numpy as jnp
import optax

import gradaccum
import gradaccum_jax

from .optax_optimizers import COMBINATORS, OF_THE_BATCH, REFUSED, factories, make, params

STEPS, WINDOWS, ITEMS = 3, 3, 2
TOLERANCE = 1e-12
QUICK = {"xla_cpu_use_fusion_emitters": False}
"""Halves the time that XLA:CPU compiles a small program for."""
FACTORIES = factories()
STREAMED = sorted(FACTORIES.keys() - REFUSED.keys() - OF_THE_BATCH.keys())
RNG = np.random.default_rng(5)
X, Y = RNG.normal(size=(WINDOWS, STEPS, ITEMS, 3)), RNG.normal(size=(WINDOWS, STEPS, ITEMS, 2))


@pytest.fixture(autouse=True)
def wide_and_quickly_compiled() -> Iterator[None]:
    """float64, and without most of XLA's passes, which would take ten times as long as the runs."""
    jax.config.update("jax_disable_most_optimizations", True)
    with (jax.enable_x64 if hasattr(jax, "enable_x64") else jax.experimental.enable_x64)(True):
        yield
    jax.config.update("jax_disable_most_optimizations", False)


pytestmark = [
    pytest.mark.filterwarnings("ignore:inject_stateful_hyperparams is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:`optimistic_adam` is deprecated:DeprecationWarning"),
]


def loss(params: Any, x: Any, y: Any) -> Any:
    return jnp.mean(jnp.sum((jnp.tanh(x @ params["w"]) + params["b"] - y) ** 2, axis=-1))


GRADIENT = jax.jit(jax.grad(loss))


def of_batch(names: tuple[str, ...], params: Any, x: Any, y: Any) -> dict[str, Any]:
    """The extra arguments `names` for the batch (x, y)."""

    def value_fn(params: Any) -> Any:
        return loss(params, x, y)

    made = {"value": value_fn(params), "grad": jax.grad(value_fn)(params), "value_fn": value_fn, "obj_fn": value_fn}
    return {name: made[name] for name in names}


def bare_run(inner: Any, start: Any) -> list[Any]:
    """The parameters and the optimizer's state after each large batch. Op by op: the programs of single ops serve all optimizers."""
    params, state, held = start, inner.init(start), []
    for x, y in zip(X, Y, strict=True):
        updates, state = inner.update(GRADIENT(params, x.reshape(-1, 3), y.reshape(-1, 2)), state, params)
        params = optax.apply_updates(params, updates)
        held.append((params, state))
    return held


def streamed_run(tx: Any, start: Any) -> list[Any]:
    """The parameters and the wrapped optimizer's state before the first micro-batch and after each."""
    held, update = [(start, tx.init(start))], jax.jit(tx.update, compiler_options=QUICK)
    for x, y in zip(X.reshape(-1, ITEMS, 3), Y.reshape(-1, ITEMS, 2), strict=True):
        params, state = held[-1]
        updates, state = update(GRADIENT(params, x, y), state, params)
        held.append((optax.apply_updates(params, updates), state))
    assert update._cache_size() == 1
    return held


def leaves_of(tree: Any) -> list[np.ndarray[Any, Any]]:
    leaves = map(jnp.asarray, jax.tree.leaves(tree))
    return [np.asarray(jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf) for leaf in leaves]


def assert_bitwise(after: Any, before: Any) -> None:
    for a, b in zip(leaves_of(after), leaves_of(before), strict=True):
        assert a.tobytes() == b.tobytes()


def assert_close(ours: Any, theirs: Any) -> None:
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for a, b in zip(leaves_of(ours), leaves_of(theirs), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("name", STREAMED)
def test_equals_the_bare_optimizer(name: str) -> None:
    inner, start = make(name, FACTORIES[name]), params()
    ours, theirs = streamed_run(gradaccum.wrap(inner, steps=STEPS), start), bare_run(inner, start)
    for number, (before, after) in enumerate(pairwise(ours), start=1):
        window, within = divmod(number, STEPS)
        assert after[1].optimizer_step == window
        if within:
            assert_bitwise((after[0], after[1].inner_state), (before[0], before[1].inner_state))
        else:
            assert_close((after[0], after[1].inner_state), theirs[window - 1])
