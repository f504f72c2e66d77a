"""A wrapped optimizer as one part of what optax's combinators make, and parameters that
the wrapped optimizer does not train.
"""

from __future__ import annotations

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradaccum
import gradaccum_jax


def assert_same_bits(found: Any, expected: Any) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


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


def wrap(inner: Any, **options: Any) -> Any:
    return gradaccum.wrap(inner, **{"steps": 4, **options})


def partition(trained: Any, frozen: Any = None) -> Any:
    return optax.partition(
        {"trained": trained, "frozen": frozen or optax.set_to_zero()}, LABELS
    )


def begun(tx: Any, params: Any = PARAMS) -> Any:
    """The state with two micro-batches in an open window."""
    state, update = tx.init(params), jax.jit(tx.update)
    for gradient in GRADS:
        updates, state = update(gradient, state, params)
        assert not updates["a"].any()
    return state


def states_beside(state: Any) -> list[Any]:
    """The leaves of a state outside of the wrapped part."""
    is_part = lambda node: isinstance(node, gradaccum_jax.AccumulationState)  # noqa: E731
    return [
        leaf for leaf in jax.tree.leaves(state, is_leaf=is_part) if not is_part(leaf)
    ]


def partitioned_sgd() -> Any:
    return partition(wrap(optax.sgd(1.0)))


NESTS = {
    "beside a bare one": lambda: partition(wrap(optax.sgd(1.0)), optax.adam(1.0)),
    "partition": partitioned_sgd,
    "masked": lambda: optax.chain(
        optax.masked(wrap(optax.sgd(1.0)), TRAINED),
        optax.masked(optax.set_to_zero(), FROZEN),
    ),
    "behind a momentum": lambda: optax.chain(
        partition(optax.trace(0.0)), optax.masked(wrap(optax.sgd(1.0)), TRAINED)
    ),
    "scaled": lambda: optax.chain(
        optax.partition(
            {"trained": wrap(optax.identity()), "frozen": optax.set_to_zero()}, LABELS
        ),
        optax.scale(-1.0),
    ),
    "named": lambda: optax.named_chain(
        ("clip", optax.clip(1e9)), ("own", partitioned_sgd())
    ),
    "injected": lambda: optax.inject_hyperparams(
        lambda rate: partition(wrap(optax.sgd(rate)))
    )(rate=1.0),
}


@pytest.mark.parametrize("jitted", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("name", NESTS)
def test_flush_closes_the_wrapped_part_alone(name: str, jitted: bool) -> None:
    """The mean of the two gradients, (6, 8), of norm 10; nothing else moves, and a
    second flush does nothing.
    """
    tx = NESTS[name]()
    state = begun(tx)

    def flush(state: Any) -> Any:
        return gradaccum_jax.flush(tx, state, PARAMS)

    updates, after = (jax.jit(flush) if jitted else flush)(state)
    np.testing.assert_array_equal(updates["a"], [-6.0, -8.0])
    assert_same_bits(optax.apply_updates(PARAMS, updates)["z"], PARAMS["z"])
    result = gradaccum_jax.result(after)
    assert (bool(result.applied), float(result.grad_norm)) == (True, 10.0)
    assert int(result.optimizer_step) == 1
    assert_same_bits(states_beside(after), states_beside(state))
    updates, empty = flush(after)
    assert not any(leaf.any() for leaf in jax.tree.leaves(updates))
    assert not gradaccum_jax.result(empty).applied
    assert gradaccum_jax.result(empty).optimizer_step == 1


def test_discard_forgets_the_wrapped_part_alone() -> None:
    tx = partition(wrap(optax.sgd(1.0)), optax.adam(1.0))
    state = begun(tx)
    after = gradaccum_jax.discard(tx, state)
    assert gradaccum_jax.describe(state) == "micro-batch 2 of 4, update 0"
    assert gradaccum_jax.describe(after) == "micro-batch 0 of 4, update 0"
    assert_same_bits(states_beside(after), states_beside(state))


def test_check_state_of_the_whole() -> None:
    tx = partition(wrap(optax.adam(1.0)))
    state = begun(tx)
    assert_same_bits(gradaccum_jax.check_state(tx, state, PARAMS), state)
    other = partition(wrap(optax.adam(1.0), steps=5))
    with pytest.raises(gradaccum.CheckpointError, match=r"^steps: expected an open"):
        gradaccum_jax.check_state(other, state, PARAMS)
    with pytest.raises(gradaccum.CheckpointError, match=r"^state\.inner_states"):
        gradaccum_jax.check_state(partition(wrap(optax.sgd(1.0))), state, PARAMS)
    with pytest.raises(gradaccum.ArgumentTypeError, match="tx: expected a wrapped"):
        gradaccum_jax.check_state(optax.sgd(1.0), begun(wrap(optax.sgd(1.0))), PARAMS)


def test_masters_are_found_behind_frozen_parameters() -> None:
    """The frozen ones are of half precision too, and come first."""
    params = {
        "a": jnp.ones(2, jnp.bfloat16),
        "b": jnp.full(2, 5.0),
        "c": jnp.full(2, 9.0, jnp.bfloat16),
    }
    tx = optax.partition(
        {
            "trained": wrap(optax.sgd(1.0), steps=1, master_weights=True),
            "frozen": optax.set_to_zero(),
        },
        {"a": "frozen", "b": "frozen", "c": "trained"},
    )
    updates, state = tx.update(
        jax.tree.map(jnp.ones_like, params), tx.init(params), params
    )
    moved = gradaccum_jax.apply_updates(params, updates, state)
    assert [float(moved[name][0]) for name in "abc"] == [1.0, 5.0, 8.0]


SGD, ADAM = optax.sgd(1.0), optax.scale_by_adam()
REFUSED = {
    "no wrapped part": (
        lambda: partition(SGD),
        gradaccum.ArgumentTypeError,
        "state: expected.*that holds 0 of them",
    ),
    "several": (
        lambda: partition(wrap(SGD), wrap(SGD)),
        gradaccum.ArgumentTypeError,
        "state: expected.*that holds 2 of them",
    ),
    "a schedule behind": (
        lambda: optax.chain(wrap(ADAM), optax.scale_by_schedule(lambda count: 1.0)),
        gradaccum.UsageError,
        r"tx: expected no state around.*got state\[1\]\.count.*Wrap the whole",
    ),
    "a momentum behind": (
        lambda: optax.chain(wrap(ADAM), optax.trace(0.9)),
        gradaccum.UsageError,
        r"got state\[1\]\.trace\['a'\]",
    ),
}


@pytest.mark.every_mode
@pytest.mark.parametrize("name", REFUSED)
def test_flush_that_could_be_wrong_is_refused(name: str) -> None:
    make, error, message = REFUSED[name]
    tx = make()
    state = tx.init(PARAMS)
    with pytest.raises(error, match=message):
        gradaccum_jax.flush(tx, state, PARAMS)


def test_flush_asks_for_the_parameters_of_all() -> None:
    tx = partition(wrap(optax.sgd(1.0)))
    with pytest.raises(gradaccum.ArgumentTypeError, match="params: expected all"):
        gradaccum_jax.flush(tx, begun(tx))
    chain = optax.chain(wrap(optax.sgd(1.0)))
    gradients = jax.tree.map(jnp.ones_like, PARAMS)
    _, state = chain.update(gradients, chain.init(PARAMS))
    assert gradaccum_jax.flush(chain, state)[0]["a"].tolist() == [-1.0, -1.0]


def test_one_call_says_where_frozen_parameters_go() -> None:
    tx = partition(wrap(optax.sgd(1.0), steps=None))
    with pytest.raises(
        gradaccum.ArgumentTypeError, match=r"tx: expected a wrapped.*with axes=None"
    ):
        gradaccum_jax.value_and_update(lambda p, x: x.mean(), tx, steps=2)


# Parameters that the inner optimizer does not train, inside of the wrapper.


UNREAD = {
    "partition": lambda: partition(optax.adam(1.0)),
    "before": lambda: optax.chain(
        optax.masked(optax.set_to_zero(), FROZEN), optax.adam(1.0)
    ),
}
FREEZING = {
    "after": lambda: optax.chain(
        optax.adamw(1.0), optax.masked(optax.set_to_zero(), FROZEN)
    ),
    "after a partition": lambda: optax.chain(
        partition(optax.sgd(1.0), optax.trace(0.9)),
        optax.masked(optax.set_to_zero(), FROZEN),
    ),
}
TRAINING = {
    "all": lambda: optax.adamw(1.0),
    "rates": lambda: partition(optax.sgd(1.0), optax.sgd(0.0)),
    "a decay alone": lambda: partition(
        optax.sgd(1.0), optax.chain(optax.scale(0.0), optax.add_decayed_weights(0.1))
    ),
    "later": lambda: optax.conditionally_mask(optax.sgd(1.0), lambda step: step > 3),
    "none": lambda: optax.set_to_zero(),
}


def run(tx: Any) -> None:
    """A window of two, compiled and op by op, and a flush."""
    state = tx.init(PARAMS)
    gradients = jax.tree.map(jnp.ones_like, PARAMS)
    for update in (tx.update, jax.jit(tx.update)):
        _, state = update(gradients, state, PARAMS)
    gradaccum_jax.flush(tx, state, PARAMS)


@pytest.mark.parametrize("given", [True, False], ids=["params", "no_params"])
@pytest.mark.parametrize("options", [{"clip_norm": 1.0}, {"loss_scale": 4.0}], ids=str)
@pytest.mark.parametrize("name", UNREAD)
def test_gradient_that_nobody_reads_costs_and_counts_nothing(
    name: str, options: dict[str, Any], given: bool
) -> None:
    """Not even a NaN; the trained parameters move as if they were alone."""
    tx = wrap(UNREAD[name](), steps=2, **options)
    alone = wrap(optax.adam(1.0), steps=2, **options)
    state = tx.init(PARAMS)
    other = alone.init(PARAMS["a"])
    sums = jax.tree.leaves(state.accumulator)
    assert sum(leaf.size for leaf in sums) == PARAMS["a"].size
    for gradient, update in zip(GRADS, (tx.update, jax.jit(tx.update)), strict=True):
        updates, state = update(gradient, state, *[PARAMS] * given)
        wanted, other = jax.jit(alone.update)(gradient["a"], other)
    np.testing.assert_allclose(updates["a"], wanted, rtol=1e-6)
    for leaf in jax.tree.leaves(updates["z"]):
        assert not leaf.any()
        assert jnp.signbit(leaf).all()  # -0.0 leaves each parameter as it is
    assert_same_bits(optax.apply_updates(PARAMS, updates)["z"], PARAMS["z"])
    result = gradaccum_jax.result(state)
    assert result.applied
    assert result.grad_norm == pytest.approx(gradaccum_jax.result(other).grad_norm)
    saved = gradaccum_jax.check_state(tx, jax.tree.map(np.asarray, state), PARAMS)
    assert_same_bits(saved, state)


@pytest.mark.every_mode
@pytest.mark.parametrize("name", FREEZING)
def test_frozen_gradients_in_a_norm_are_refused(name: str) -> None:
    for options in ({"clip_norm": 1.0}, {"skip_norm": 1.0}):
        with pytest.raises(
            gradaccum.UsageError,
            match=r"params\['z'\]\['u'\] and 1 more.*Write optax\.partition\(",
        ):
            run(wrap(FREEZING[name](), **options))


@pytest.mark.parametrize("name", FREEZING)
def test_frozen_gradients_are_warned_of_once(name: str) -> None:
    tx = wrap(FREEZING[name]())
    with pytest.warns(gradaccum.GradAccumWarning) as said:
        run(tx)
    run(tx)  # a warning is an error here
    assert len(said) == 1
    assert "does not train params['z']['u'] and 1 more" in str(said[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(wrap(FREEZING[name](), on_overflow="ignore"))  # nothing is measured


@pytest.mark.parametrize("name", TRAINING)
def test_trained_parameters_are_silent(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(wrap(TRAINING[name](), clip_norm=1.0, skip_norm=9.0))


def test_windows_of_windows_are_refused() -> None:
    """`MultiSteps` takes what optax's takes."""
    inner = optax.chain(optax.adam(0.1), optax.apply_every(4))
    with pytest.raises(
        gradaccum.ArgumentTypeError, match="not wrapped; got a wrapped one: ApplyEvery"
    ):
        wrap(inner).init(PARAMS)
    gradaccum_jax.MultiSteps(inner, 4).init(PARAMS)
