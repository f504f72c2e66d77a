"""A wrapped optimizer as one part of what optax's combinators make, and parameters that
the wrapped optimizer does not train.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradaccum
import gradaccum_jax

from . import jax_versions
from .jax_large_batch import assert_same_bits

PARAMS = {"a": jnp.asarray([1.0, -2.0]), "z": {"u": jnp.ones(3), "v": jnp.ones(1)}}
GRADS = [
    {
        "a": jnp.asarray([3.0 * n, 4.0 * n]),
        "z": {"u": jnp.full(3, 100.0), "v": jnp.full(1, jnp.nan)},
    }
    for n in (1, 3)
]
LABELS = {"a": "trained", "z": "frozen"}
TRAINED = {"a": True, "z": False}
FROZEN = {"a": False, "z": True}
SGD = optax.sgd(1.0)
FREEZE = optax.masked(optax.set_to_zero(), FROZEN)


def wrap(inner: Any = SGD, **options: Any) -> Any:
    return gradaccum.wrap(inner, **{"steps": 4, **options})


def partition(trained: Any, frozen: Any = None, labels: Any = LABELS) -> Any:
    return jax_versions.partition(
        {"trained": trained, "frozen": frozen or optax.set_to_zero()}, labels
    )


def begun(tx: Any) -> Any:
    """The state with two micro-batches in an open window."""
    state = tx.init(PARAMS)
    update = jax.jit(tx.update)
    for gradient in GRADS:
        updates, state = update(gradient, state, PARAMS)
        assert not updates["a"].any()
    return state


def states_beside(state: Any) -> list[Any]:
    """The leaves of a state outside of the wrapped part."""
    is_part = lambda node: isinstance(node, gradaccum_jax.AccumulationState)  # noqa: E731
    return [
        leaf for leaf in jax.tree.leaves(state, is_leaf=is_part) if not is_part(leaf)
    ]


NESTS = {
    "beside a bare one": lambda: partition(wrap(), optax.adam(1.0)),
    "masked": lambda: optax.chain(optax.masked(wrap(), TRAINED), FREEZE),
    "injected": lambda: optax.inject_hyperparams(
        lambda rate: partition(wrap(optax.sgd(rate)))
    )(rate=1.0),
}


@pytest.mark.parametrize("name", NESTS)
def test_flush_closes_the_wrapped_part_alone(name: str) -> None:
    """The mean of the two gradients, (6, 8), of norm 10; nothing else moves, and a
    second flush does nothing.
    """
    tx = NESTS[name]()
    state = begun(tx)
    flush = jax.jit(lambda state: gradaccum_jax.flush(tx, state, PARAMS))
    updates, after = flush(state)
    np.testing.assert_array_equal(updates["a"], [-6.0, -8.0])
    assert_same_bits(optax.apply_updates(PARAMS, updates)["z"], PARAMS["z"])
    result = gradaccum_jax.result(after)
    assert (result.applied, result.grad_norm, result.optimizer_step) == (True, 10.0, 1)
    assert_same_bits(states_beside(after), states_beside(state))
    updates, empty = flush(after)
    assert not any(leaf.any() for leaf in jax.tree.leaves(updates))
    assert not gradaccum_jax.result(empty).applied


def test_other_functions_of_the_whole() -> None:
    """`discard` forgets the wrapped part alone, `check_state` looks at all."""
    tx = partition(wrap(optax.adam(1.0)), optax.adam(1.0))
    state = begun(tx)
    after = gradaccum_jax.discard(tx, state)
    assert gradaccum_jax.describe(state) == "micro-batch 2 of 4, update 0"
    assert gradaccum_jax.describe(after) == "micro-batch 0 of 4, update 0"
    for steps, words in (
        ([(0, 2), (1, 3)], "micro-batch 0 of 2"),
        (gradaccum.until_weight(16), "micro-batch 0, weight 0 of 16"),
        (None, "micro-batch 0"),
    ):
        first = wrap(steps=steps).init(PARAMS)
        assert gradaccum_jax.describe(first) == f"{words}, update 0"
    assert_same_bits(states_beside(after), states_beside(state))
    assert_same_bits(gradaccum_jax.check_state(tx, state, PARAMS), state)
    other = partition(wrap(optax.adam(1.0), steps=5), optax.adam(1.0))
    with pytest.raises(gradaccum.CheckpointError, match=r"^steps: expected an open"):
        gradaccum_jax.check_state(other, state, PARAMS)
    with pytest.raises(gradaccum.CheckpointError, match=r"^state\.inner_states"):
        gradaccum_jax.check_state(partition(wrap()), state, PARAMS)


def test_masters_are_found_behind_frozen_parameters() -> None:
    """The frozen ones are of half precision too, and come first."""
    params = {
        "a": jnp.ones(2, jnp.bfloat16),
        "b": jnp.full(2, 5.0),
        "c": jnp.full(2, 9.0, jnp.bfloat16),
    }
    tx = partition(
        wrap(steps=1, master_weights=True),
        labels={"a": "frozen", "b": "frozen", "c": "trained"},
    )
    updates, state = tx.update(
        jax.tree.map(jnp.ones_like, params), tx.init(params), params
    )
    moved = gradaccum_jax.apply_updates(params, updates, state)
    assert [float(moved[name][0]) for name in "abc"] == [1.0, 5.0, 8.0]


# Parameters that the inner optimizer does not train, inside of the wrapper.

COPY = optax.GradientTransformation(
    lambda params: params, lambda updates, copy, params=None: (updates, params or copy)
)
"""Its state, which no update reads, is a copy of the parameters."""
FROZEN_INSIDE = {
    "partition": lambda: partition(optax.adam(1.0)),
    "set to zero before": lambda: optax.chain(FREEZE, optax.adam(1.0), COPY),
}


@pytest.mark.parametrize("has_params", [True, False])
@pytest.mark.parametrize("name", FROZEN_INSIDE)
def test_frozen_parameter_costs_and_counts_nothing(name: str, has_params: bool) -> None:
    """Not even a NaN; the trained parameters move as if they were alone."""
    options = {"steps": 2, "clip_norm": 1.0, "loss_scale": 4.0}
    tx = wrap(FROZEN_INSIDE[name](), **options)
    alone = wrap(optax.adam(1.0), **options)
    state = tx.init(PARAMS)
    state_alone = alone.init(PARAMS["a"])
    sums = jax.tree.leaves(state.accumulator)
    assert sum(leaf.size for leaf in sums) == PARAMS["a"].size
    for gradient, update in zip(GRADS, (tx.update, jax.jit(tx.update)), strict=True):
        updates, state = update(gradient, state, *[PARAMS] * has_params)
        update_alone, state_alone = alone.update(gradient["a"], state_alone)
        for leaf, parameter in zip(
            jax.tree.leaves(updates["z"]), jax.tree.leaves(PARAMS["z"]), strict=True
        ):
            assert leaf.shape == parameter.shape
            assert not leaf.any()
            assert jnp.signbit(leaf).all()  # -0.0 leaves each parameter as it is
    np.testing.assert_allclose(updates["a"], update_alone, rtol=1e-6)
    result = gradaccum_jax.result(state)
    assert result.applied
    assert result.grad_norm == pytest.approx(
        gradaccum_jax.result(state_alone).grad_norm
    )
    saved = gradaccum_jax.check_state(tx, jax.tree.map(np.asarray, state), PARAMS)
    assert_same_bits(saved, state)
    updates, _ = gradaccum_jax.flush(tx, tx.update(GRADS[0], state)[1])
    assert jax.tree.map(jnp.shape, updates) == jax.tree.map(jnp.shape, PARAMS)


def test_frozen_parameters_of_half_precision_have_no_sum_beside_masters() -> None:
    params = {"a": jnp.ones(2), "z": jnp.full(3, 5.0, jnp.bfloat16)}
    tx = wrap(partition(SGD), steps=1, master_weights=True)
    state = tx.init(params)
    assert state.accumulator["z"].size == 0
    gradients = {"a": jnp.ones(2), "z": jnp.full(3, jnp.nan, jnp.bfloat16)}
    updates, state = tx.update(gradients, state, params)
    moved = gradaccum_jax.apply_updates(params, updates, state)
    assert moved["a"].tolist() == [0.0, 0.0]
    assert_same_bits(moved["z"], params["z"])


@pytest.mark.every_mode
@pytest.mark.parametrize(
    "inner",
    [
        optax.chain(FREEZE, optax.sgd(1.0), optax.add_decayed_weights(-0.5)),
        optax.chain(optax.trace(0.9), FREEZE),
    ],
)
def test_parameter_without_gradient_or_update(inner: Any) -> None:
    """All is as with the bare optimizer: what has no gradient may have an update, and
    what has no update a state.
    """
    tx = wrap(inner, steps=1)
    gradients = jax.tree.map(jnp.ones_like, PARAMS)
    updates, state = tx.update(gradients, tx.init(PARAMS), PARAMS)
    wanted = inner.update(gradients, inner.init(PARAMS), PARAMS)
    assert_same_bits((updates, state.inner_state), wanted)
