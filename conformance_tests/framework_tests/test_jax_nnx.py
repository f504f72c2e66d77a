"""flax nnx keeps each array of the optimizer's state in a variable. Every function of
the state takes such variables too.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import optax
import pytest

import gradaccum
import gradaccum_jax
from conformance_tests.framework_tests.jax_large_batch import assert_same_bits

nnx = pytest.importorskip("flax.nnx", reason="flax is not installed")
pure_of = getattr(nnx, "as_pure", nnx.pure)
"""flax has `as_pure` since 0.12.8, which deprecates `pure`."""


def begun(**options: Any) -> tuple[Any, Any]:
    """Return a model and its optimizer, one micro-batch into a window."""
    model = nnx.Linear(
        2, 1, rngs=nnx.Rngs(0), param_dtype=options.pop("dtype", jnp.float32)
    )
    optimizer = nnx.Optimizer(
        model, gradaccum.wrap(optax.adam(0.5), steps=3, **options), wrt=nnx.Param
    )
    optimizer.update(
        model, nnx.grad(lambda model: jnp.sum(model(jnp.asarray([[1.0, 3.0]]))))(model)
    )
    return model, optimizer


@pytest.mark.parametrize("master_weights", [False, True])
def test_flush_takes_variables(master_weights: bool) -> None:
    model, optimizer = begun(master_weights=master_weights, dtype=jnp.bfloat16)
    params = nnx.state(model, nnx.Param)
    pure = pure_of(params)
    expected = gradaccum_jax.flush(optimizer.tx, pure_of(optimizer.opt_state), pure)
    found = gradaccum_jax.flush(optimizer.tx, optimizer.opt_state, params)
    assert_same_bits(found, expected)
    assert gradaccum_jax.result(found[1]).applied
    nnx.update(optimizer.opt_state, nnx.state(found[1]))
    assert gradaccum_jax.result(optimizer.opt_state).optimizer_step == 1
    if master_weights:
        assert_same_bits(
            gradaccum_jax.apply_updates(params, found[0], optimizer.opt_state),
            optax.apply_updates(pure, found[0]),
        )


def test_discard_takes_variables() -> None:
    model, optimizer = begun()
    state = gradaccum_jax.discard(optimizer.tx, optimizer.opt_state)
    assert_same_bits(state, optimizer.tx.init(pure_of(nnx.state(model, nnx.Param))))


def test_check_state_takes_variables() -> None:
    model, optimizer = begun()
    state = gradaccum_jax.check_state(
        optimizer.tx, optimizer.opt_state, nnx.state(model, nnx.Param)
    )
    assert_same_bits(state, pure_of(optimizer.opt_state))
    other = gradaccum.wrap(optax.adam(0.5), steps=2)
    with pytest.raises(gradaccum.CheckpointError, match=r"^steps"):
        gradaccum_jax.check_state(
            other, optimizer.opt_state, nnx.state(model, nnx.Param)
        )
