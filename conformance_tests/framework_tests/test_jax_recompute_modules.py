"""Layers of flax nnx, flax linen and equinox in recomputed functions: state moves once, or the call is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("optax", reason="optax is not installed")
import jax
import jax.numpy as jnp

import gradaccum
from gradaccum_jax import recompute

nnx = pytest.importorskip("flax.nnx", reason="flax is not installed")
linen = pytest.importorskip("flax.linen", reason="flax is not installed")
equinox = pytest.importorskip("equinox", reason="equinox is not installed")

X = jnp.asarray(np.random.default_rng(0).normal(size=(6, 3)), jnp.float32)


class Block(nnx.Module):  # type: ignore[misc]
    """Running statistics and a counted random stream, both changed by a call."""

    def __init__(self, seed: int = 0) -> None:
        rngs = nnx.Rngs(seed, dropout=seed + 1)
        self.linear, self.norm = nnx.Linear(3, 3, rngs=rngs), nnx.BatchNorm(3, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x: Any, scale: float = 1.0) -> Any:
        return self.dropout(self.norm(jnp.tanh(self.linear(x)))) * scale

    def run(self, x: Any) -> Any:
        return self(x)


def state_of(module: Any) -> Any:
    return jax.tree.map(lambda leaf: np.asarray(jax.random.key_data(leaf) if is_key(leaf) else leaf), nnx.to_pure_dict(nnx.state(module)))


def is_key(leaf: Any) -> bool:
    return bool(jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key))


def assert_same(found: Any, expected: Any) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def trained(call: Any, *, steps: int = 2) -> Any:
    """The gradients of two steps and the module's state after them."""
    block = Block()
    step = nnx.jit(nnx.grad(lambda block: jnp.sum(call(block)(X) ** 3)))
    gradients = [nnx.to_pure_dict(step(block)) for _ in range(steps)]
    return gradients, state_of(block)


@pytest.mark.parametrize("way", ["module", "method", "argument", "chain"])
def test_nnx_state_moves_once(way: str) -> None:
    """The running statistics, the dropout's counter and the gradients are those of the plain module, step after step."""
    calls: dict[str, Any] = {
        "module": recompute,
        "method": lambda block: recompute(block.run),
        "argument": lambda block: lambda x: recompute(lambda block, x: block(x))(block, x),
        "chain": lambda block: recompute([block]),
    }
    found, expected = trained(calls[way]), trained(lambda block: block)
    assert_same(found, expected)
    assert not np.array_equal(expected[1]["norm"]["mean"], state_of(Block())["norm"]["mean"])


def test_nnx_layer_used_twice() -> None:
    """Both runs of a shared module move its statistics."""
    found, expected = trained(lambda block: recompute([block, block], segments=1)), trained(lambda block: lambda x: block(block(x)))
    assert_same(found, expected)


def test_nnx_chain_reads_new_parameters() -> None:
    block = nnx.Linear(3, 3, rngs=nnx.Rngs(0))
    function = recompute([block, jnp.tanh])
    before = function(X)
    block.kernel[...] = block.kernel[...] * 2
    assert not np.array_equal(function(X), before)
    np.testing.assert_array_equal(function(X), jnp.tanh(block(X)))


def test_nnx_error_changes_nothing() -> None:
    block = Block()
    before = state_of(block)

    def failing(block: Any, x: Any) -> Any:
        block(x)
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        recompute(failing)(block, X)
    assert_same(state_of(block), before)


def test_nnx_new_variables_are_refused() -> None:
    class Growing(nnx.Module):  # type: ignore[misc]
        def __call__(self, x: Any) -> Any:
            self.seen = nnx.Intermediate(x)
            return jnp.sin(x)

    with pytest.raises(gradaccum.UsageError, match="keep their structure"):
        recompute(Growing())(X)


def test_nnx_closure_is_refused_by_flax() -> None:
    """The state of a module that is only closed over cannot be written: flax says so."""
    block = Block()
    with pytest.raises(Exception, match="different trace level"):
        recompute(lambda x: block(x))(X)


def test_linen_apply() -> None:
    """Batch statistics are a result, dropout's key an argument."""

    class Model(linen.Module):  # type: ignore[misc]
        @linen.compact
        def __call__(self, x: Any) -> Any:
            x = linen.BatchNorm(use_running_average=False)(linen.Dense(3)(x))
            return linen.Dropout(0.5, deterministic=False)(jnp.tanh(x))

    model = Model()
    variables = model.init({"params": jax.random.key(0), "dropout": jax.random.key(1)}, X)

    def loss(params: Any, apply: Any) -> Any:
        made, state = apply({**variables, "params": params}, X, rngs={"dropout": jax.random.key(2)}, mutable=["batch_stats"])
        return jnp.sum(made**3), state

    gradient = jax.jit(jax.grad(loss, has_aux=True), static_argnums=1)
    assert_same(gradient(variables["params"], recompute(model.apply)), gradient(variables["params"], model.apply))


def test_linen_modules_are_refused() -> None:
    with pytest.raises(gradaccum.UsageError, match=r"apply.*flax\.linen\.remat\(Dense\)"):
        recompute(linen.Dense(3))

    class Outer(linen.Module):  # type: ignore[misc]
        @linen.compact
        def __call__(self, x: Any) -> Any:
            inner = linen.Dense(3)
            return recompute(lambda x: inner(x))(x)

    with pytest.raises(gradaccum.UsageError, match=r"flax\.linen\.remat\(Dense\)"):
        Outer().init(jax.random.key(0), X)


def test_equinox_modules() -> None:
    """As the function, and as an argument whose leaves are functions too."""
    model = equinox.nn.MLP(3, 3, 8, 2, key=jax.random.key(0))
    expected = equinox.filter_jit(equinox.filter_grad(lambda model: jnp.sum(model(X[0]))))(model)
    for call in (lambda model: recompute(model)(X[0]), lambda model: recompute(lambda model, x: model(x))(model, X[0])):
        found = equinox.filter_jit(equinox.filter_grad(lambda model, call=call: jnp.sum(call(model))))(model)
        assert_same(equinox.filter(found, equinox.is_array), equinox.filter(expected, equinox.is_array))
