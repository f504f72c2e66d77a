"""flax nnx keeps each array of the optimizer's state in a variable: every function of
the state takes such variables, and those that are no parameters are refused.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import optax
import pytest

import gradaccum
import gradaccum_jax

from .jax_large_batch import assert_same_bits

nnx = pytest.importorskip("flax.nnx")
pure_of = getattr(nnx, "as_pure", nnx.pure)
"""flax has `as_pure` since 0.12.8, which deprecates `pure`."""
X = jnp.arange(12.0).reshape(6, 2) / 12


def test_functions_of_the_state_take_variables() -> None:
    model = nnx.Linear(2, 1, rngs=nnx.Rngs(0), param_dtype=jnp.bfloat16)
    tx = gradaccum.wrap(optax.adam(0.5), steps=3, master_weights=True)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    optimizer.update(model, nnx.grad(lambda model: model(X).sum())(model))
    held, params = optimizer.opt_state, nnx.state(model, nnx.Param)
    pure, pure_params = pure_of(held), pure_of(params)

    assert_same_bits(gradaccum_jax.check_state(tx, held, params), pure)
    other = gradaccum.wrap(optax.adam(0.5), steps=2, master_weights=True)
    with pytest.raises(gradaccum.CheckpointError, match=r"^steps"):
        gradaccum_jax.check_state(other, held, params)
    assert_same_bits(gradaccum_jax.discard(tx, held), tx.init(pure_params))
    updates, state = gradaccum_jax.flush(tx, held, params)
    assert_same_bits((updates, state), gradaccum_jax.flush(tx, pure, pure_params))
    nnx.update(held, nnx.state(state))
    assert gradaccum_jax.result(held).optimizer_step == 1
    assert jnp.isnan(gradaccum_jax.result(held).loss)
    assert_same_bits(
        gradaccum_jax.apply_updates(params, updates, held),
        gradaccum_jax.apply_updates(pure_params, updates, state),
    )


def loss(model: Any, x: Any) -> Any:
    return jnp.mean((model(x) - 1) ** 2)


class OwnVariable(nnx.Variable):
    """A variable of a class that flax does not know."""


def linear_with(kind: Any) -> Any:
    model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    model.variable = kind(jnp.zeros(()))
    return model


REFUSED = {
    "a BatchStat of a flax nnx": lambda: nnx.BatchNorm(2, rngs=nnx.Rngs(0)),
    "a Cache of a flax nnx": lambda: linear_with(nnx.Cache),
    "a OwnVariable of a flax nnx": lambda: linear_with(OwnVariable),
    "a Rng.*copy=True": lambda: nnx.Dropout(0.5, rngs=nnx.Rngs(0)),
}


@pytest.mark.parametrize("words", REFUSED)
def test_variables_that_are_no_parameters_are_refused(words: str) -> None:
    """Statistics would be trained, and what the layers make of them lost. Each
    micro-batch would start from the same count of a random stream.
    """
    model, tx = REFUSED[words](), gradaccum.wrap(optax.sgd(1.0), steps=None)
    state = tx.init(jnp.ones(()))
    calls = [
        lambda given: gradaccum_jax.value_and_grad(loss, steps=3)(given, X),
        lambda given: gradaccum_jax.value_and_update(loss, tx, steps=3)(
            given, state, X
        ),
        lambda given: gradaccum_jax.coupled_value_and_grad(
            lambda model, x: model(x), lambda model, z: z.mean(), steps=3
        )(given, X),
    ]
    for call in calls:
        with pytest.raises(
            gradaccum.ArgumentTypeError,
            match=rf"^params.*: expected only parameters; got {words}.*nnx\.",
        ):
            call(model)
