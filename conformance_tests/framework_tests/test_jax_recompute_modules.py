"""Layers of flax nnx, flax linen and equinox in recomputed functions: flax's modules
are refused, as flax recomputes them itself.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradaccum
from conformance_tests.framework_tests.jax_chain import assert_same_bits
from gradaccum_jax import recompute

nnx = pytest.importorskip("flax.nnx", reason="flax is not installed")
linen = pytest.importorskip("flax.linen", reason="flax is not installed")
equinox = pytest.importorskip("equinox", reason="equinox is not installed")

X = jnp.asarray(np.random.default_rng(0).normal(size=(6, 3)), jnp.float32)


class Block(nnx.Module):  # type: ignore[misc]
    """Running statistics and a counted random stream, both changed by a call."""

    def __init__(self, seed: int = 0) -> None:
        rngs = nnx.Rngs(seed, dropout=seed + 1)
        self.linear, self.norm = (
            nnx.Linear(3, 3, rngs=rngs),
            nnx.BatchNorm(3, rngs=rngs),
        )
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x: Any, scale: float = 1.0) -> Any:
        return self.dropout(self.norm(jnp.tanh(self.linear(x)))) * scale

    def run(self, x: Any) -> Any:
        return self(x)


def state_of(module: Any) -> Any:
    return jax.tree.map(
        lambda leaf: np.asarray(jax.random.key_data(leaf) if is_key(leaf) else leaf),
        nnx.to_pure_dict(nnx.state(module)),
    )


def is_key(leaf: Any) -> bool:
    return bool(jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key))


@pytest.mark.parametrize("way", ["module", "method", "argument", "chain", "closure"])
def test_nnx_modules_are_refused(way: str) -> None:
    """Running statistics and random streams would change twice, or be lost. The module
    stays as it was, and flax's own way goes on.
    """
    block = Block()
    before = state_of(block)
    calls: dict[str, Any] = {
        "module": lambda: recompute(block),
        "method": lambda: recompute(block.run),
        "argument": lambda: recompute(lambda block, x: block(x))(block, X),
        "chain": lambda: recompute([jnp.sin, block]),
        "closure": lambda: recompute(lambda x: block(x)),
    }
    with pytest.raises(
        gradaccum.UsageError,
        match=(
            r"expected a pure function; got Block, a flax nnx module.*flax\.nnx\.remat"
        ),
    ):
        calls[way]()
    assert_same_bits(state_of(block), before)
    nnx.remat(lambda block, x: block(x))(block, X)
    assert not np.array_equal(before["norm"]["mean"], state_of(block)["norm"]["mean"])


def test_linen_apply() -> None:
    """Batch statistics are a result, dropout's key an argument."""

    class Model(linen.Module):  # type: ignore[misc]
        @linen.compact
        def __call__(self, x: Any) -> Any:
            x = linen.BatchNorm(use_running_average=False)(linen.Dense(3)(x))
            return linen.Dropout(0.5, deterministic=False)(jnp.tanh(x))

    model = Model()
    variables = model.init(
        {"params": jax.random.key(0), "dropout": jax.random.key(1)}, X
    )

    def loss(params: Any, apply: Any) -> Any:
        made, state = apply(
            {**variables, "params": params},
            X,
            rngs={"dropout": jax.random.key(2)},
            mutable=["batch_stats"],
        )
        return jnp.sum(made**3), state

    gradient = jax.jit(jax.grad(loss, has_aux=True), static_argnums=1)
    assert_same_bits(
        gradient(variables["params"], recompute(model.apply)),
        gradient(variables["params"], model.apply),
    )


def test_linen_modules_are_refused() -> None:
    with pytest.raises(
        gradaccum.UsageError, match=r"apply.*flax\.linen\.remat\(Dense\)"
    ):
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
    expected = equinox.filter_jit(
        equinox.filter_grad(lambda model: jnp.sum(model(X[0])))
    )(model)
    for call in (
        lambda model: recompute(model)(X[0]),
        lambda model: recompute(lambda model, x: model(x))(model, X[0]),
    ):
        found = equinox.filter_jit(
            equinox.filter_grad(lambda model, call=call: jnp.sum(call(model)))
        )(model)
        assert_same_bits(
            equinox.filter(found, equinox.is_array),
            equinox.filter(expected, equinox.is_array),
        )
