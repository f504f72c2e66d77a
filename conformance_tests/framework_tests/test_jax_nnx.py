"""flax nnx keeps each array of the optimizer's state in a variable. Every function of
the state takes such variables too.
"""

from __future__ import annotations

from typing import Any

import jax
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


# A module, or its variables, in the calls that take a large batch.


X = jnp.arange(12.0).reshape(6, 2) / 12


class Net(nnx.Module):  # type: ignore[misc, name-defined]
    """A module; of the other kinds of variables it has those that are asked for."""

    def __init__(self, *kinds: str) -> None:
        self.linear = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
        if "statistics" in kinds:
            self.norm = nnx.BatchNorm(1, rngs=nnx.Rngs(0))
        if "own" in kinds:
            self.offset = Own(jnp.ones(1))

    def __call__(self, x: Any) -> Any:
        return self.linear(x)


class Own(nnx.Variable):  # type: ignore[misc, name-defined]
    """A kind of the user's."""


def loss(model: Any, x: Any) -> Any:
    return jnp.mean((model(x) - 1) ** 2)


def calls() -> list[Any]:
    tx = gradaccum.wrap(optax.sgd(1.0), steps=None)
    return [
        gradaccum_jax.value_and_grad(loss, steps=3),
        lambda model, x: gradaccum_jax.value_and_update(loss, tx, steps=3)(
            model, tx.init(nnx.state(model, nnx.Param)), x
        ),
        gradaccum_jax.coupled_value_and_grad(
            lambda model, x: model(x), lambda model, z: z.mean(), steps=3
        ),
    ]


@pytest.mark.parametrize("kind", ["statistics", "own"])
def test_variables_that_are_no_parameters_are_refused(kind: str) -> None:
    """They would be trained, and what the layers make of them lost."""
    name = {"statistics": "BatchStat", "own": "Own"}[kind]
    model = Net(kind)
    for call in calls():
        for given in (model, nnx.state(model)):
            with pytest.raises(
                gradaccum.ArgumentTypeError,
                match=rf"parameters alone; got a {name} of a flax nnx.*nnx\.split\(",
            ):
                call(given, X)


def test_statistics_among_the_parameters_of_an_optimizer_are_refused() -> None:
    model = Net("statistics")
    tx = gradaccum.wrap(optax.adamw(1.0), steps=2)
    with pytest.raises(
        gradaccum.ArgumentTypeError,
        match=r"norm.*mean.*: expected parameters alone; got a BatchStat.*nnx\.state\(",
    ):
        tx.init(nnx.state(model))
    tx.init(nnx.state(model, nnx.Param))
    tx.init(nnx.state(Net("own"), (nnx.Param, Own)))  # as the user says


def test_module_of_parameters_alone() -> None:
    """The update is that of the split module, in one compiled call."""
    model = Net()
    graph, params = nnx.split(model, nnx.Param)
    tx = gradaccum.wrap(optax.sgd(0.5), steps=None)
    split = gradaccum_jax.value_and_update(
        lambda params, x: loss(nnx.merge(graph, params), x), tx, steps=3
    )
    value, updates, _ = split(params, tx.init(params), X)
    wanted = jax.grad(lambda params: loss(nnx.merge(graph, params), X))(params)
    made, module_updates, state = gradaccum_jax.value_and_update(loss, tx, steps=3)(
        model, tx.init(model), X
    )
    assert gradaccum_jax.result(state).applied
    assert_same_bits(made, value)
    for own, theirs, gradient in zip(
        *map(jax.tree.leaves, (module_updates, updates, wanted)), strict=True
    ):
        assert_same_bits(own, theirs)
        assert jnp.allclose(own, -0.5 * gradient, rtol=1e-5)


def test_variables_of_one_own_kind_are_trained() -> None:
    model = Net("own")
    graph, own, rest = nnx.split(model, Own, ...)

    def shifted(own: Any, x: Any) -> Any:
        model = nnx.merge(graph, own, rest, copy=True)
        return jnp.mean((model(x) + model.offset[...]) ** 2)

    _, gradient = gradaccum_jax.value_and_grad(shifted, steps=3)(own, X)
    wanted = jax.grad(shifted)(own, X)
    for made, other in zip(*map(jax.tree.leaves, (gradient, wanted)), strict=True):
        assert jnp.allclose(made, other, rtol=1e-5)
