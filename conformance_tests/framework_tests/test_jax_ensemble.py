"""Ensembles under `jax.vmap`: each member trains as if alone, whether or not the other
members end their windows too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradaccum
import gradaccum_jax
from gradaccum_jax.xla import run_if as once

MEMBERS, MICRO_BATCHES = 3, 9
PARAMS = {
    "w": jnp.asarray(
        np.random.default_rng(0).normal(size=(MEMBERS, 2, 3)), jnp.float32
    ),
    "b": jnp.ones((MEMBERS, 2)),
}
GRADS = [
    jax.tree.map(lambda p, i=i: p * (i + 1) - 0.5, PARAMS) for i in range(MICRO_BATCHES)
]
SCALE = gradaccum.DynamicLossScale(init_scale=4.0, growth_interval=1)
MAKERS: dict[str, Callable[[Any], Any]] = {
    "plain": lambda inner: gradaccum.wrap(inner, steps=2),
    "clipped": lambda inner: gradaccum.wrap(
        inner, steps=2, clip_norm=0.5, loss_scale=SCALE
    ),
    "dropping": lambda inner: gradaccum.wrap(
        inner, steps=2, on_overflow="drop_micro_batch"
    ),
    "schedule": lambda inner: gradaccum.wrap(inner, steps=[(0, 1), (2, 3)]),
    "no_steps": lambda inner: gradaccum.wrap(inner, steps=None),
    "multisteps": lambda inner: gradaccum_jax.MultiSteps(
        inner, 2, should_skip_update_fn=optax.skip_not_finite
    ),
}


def spoiled(index: int) -> Any:
    """Return the gradients of a micro-batch. A NaN in the second member's fourth and
    the third's seventh makes their windows end apart.
    """
    member = {3: 1, 6: 2}.get(index)
    return (
        GRADS[index]
        if member is None
        else {**GRADS[index], "b": GRADS[index]["b"].at[member, 0].set(jnp.nan)}
    )


def lifted(tx: Any, lift: Callable[..., Any]) -> tuple[Any, Any]:
    """Return the initial state and the step of `tx` as functions, compiled, of as many
    members as `lift` maps them over.
    """

    def step(params: Any, state: Any, grads: Any) -> Any:
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return jax.jit(lift(tx.init)), jax.jit(lift(step))


def train(
    functions: tuple[Any, Any], params: Any, choose: Callable[[Any], Any]
) -> list[Any]:
    """Return the parameters and the state after every micro-batch."""
    init, step = functions
    carried, seen = (params, init(params)), []
    for index in range(MICRO_BATCHES):
        carried = step(*carried, choose(spoiled(index)))
        seen.append(carried)
    return seen


def member(tree: Any, index: int) -> Any:
    return jax.tree.map(lambda leaf: leaf[index], tree)


def assert_close(a: Any, b: Any) -> None:
    """Compare but for the last bits: XLA sums the norm of a batch in another order."""
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-7), a, b
    )


@pytest.mark.parametrize("name", MAKERS)
def test_members_train_as_if_alone(name: str) -> None:
    tx = MAKERS[name](optax.sgd(0.5, momentum=0.5))
    together = train(lifted(tx, jax.vmap), PARAMS, lambda grads: grads)
    one = lifted(tx, lambda function: function)
    for index in range(MEMBERS):
        alone = train(
            one, member(PARAMS, index), lambda grads, index=index: member(grads, index)
        )
        for step, single in zip(together, alone, strict=True):
            assert_close(member(step, index), single)


@pytest.mark.deep
def test_nested_ensembles() -> None:
    tx = MAKERS["plain"](optax.sgd(0.5))
    nested = {"b": jnp.stack([PARAMS["b"], 2 * PARAMS["b"]])}
    twice = train(
        lifted(tx, lambda f: jax.vmap(jax.vmap(f))),
        nested,
        lambda grads: {"b": jnp.stack([grads["b"], grads["b"] + 1])},
    )
    single = train(
        lifted(tx, jax.vmap), member(nested, 1), lambda grads: {"b": grads["b"] + 1}
    )
    for a, b in zip(twice, single, strict=True):
        assert_close(member(a, 1), b)


@pytest.mark.parametrize(
    "make",
    [MAKERS["plain"], lambda inner: gradaccum_jax.MultiSteps(inner, 2)],
    ids=["wrap", "multisteps"],
)
def test_windows_ending_together_share_one_run(make: Callable[[Any], Any]) -> None:
    """A member whose window ends apart from the others gets a run of its own."""
    runs: list[tuple[int, ...]] = []

    def note(value: Any) -> Any:
        runs.append(np.shape(value))
        return np.zeros(np.shape(value), np.float32)

    def update(gradients: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        zero = jax.pure_callback(
            note,
            jax.ShapeDtypeStruct((), jnp.float32),
            gradients[0],
            vmap_method="expand_dims",
        )
        return zero - gradients, state

    tx = make(optax.GradientTransformation(lambda params: optax.EmptyState(), update))
    params = jnp.ones((MEMBERS, 2))
    step = jax.jit(jax.vmap(tx.update))

    def run(state: Any, count: int) -> Any:
        for _ in range(count):
            _, state = jax.block_until_ready(step(params, state, params))
        return state

    state = run(jax.vmap(tx.init)(params), 2)
    assert runs == [(MEMBERS,)]
    first = "micro_step" if hasattr(state, "micro_step") else "mini_step"
    run(state._replace(**{first: jnp.asarray([1, 0, 1], jnp.int32)}), 1)
    assert runs == [(MEMBERS,), (), ()]


def test_once_takes_constants_of_every_kind() -> None:
    """Constants traced from outside, shared by the batch or not: arrays, numbers and
    random keys.
    """
    key, shared = jax.random.key(0), np.arange(3.0, dtype=np.float32)

    @jax.jit
    def outer(wanted: Any, x: Any, factor: Any) -> Any:
        def change(carry: Any) -> Any:
            return (
                carry[0] * factor + shared + 1.5 + jax.random.uniform(key),
                carry[1] + 1,
                carry[2],
            )

        return jax.vmap(lambda wanted, x: once(wanted, change, (x, 0, True)))(wanted, x)

    x, noise = jnp.ones((2, 3)), float(jax.random.uniform(key))
    for wanted in ([True, True], [True, False], [False, False]):
        got, counts, flags = outer(jnp.asarray(wanted), x, 2.0)
        expected = np.where(
            np.asarray(wanted)[:, None], 2.0 + shared + 1.5 + noise, 1.0
        )
        np.testing.assert_allclose(got, expected, rtol=1e-6)
        np.testing.assert_array_equal(counts, wanted)
        np.testing.assert_array_equal(flags, [True, True])


@pytest.mark.parametrize(
    "make", [gradaccum.wrap, gradaccum_jax.MultiSteps], ids=["wrap", "multisteps"]
)
def test_optimizer_that_reduces_over_members_is_refused(
    make: Callable[..., Any],
) -> None:
    """Where one member's window ends and another's does not, nobody could say what it
    reduces.
    """

    def update(gradients: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        return jax.lax.pmean(gradients, "members"), state

    tx, params = (
        make(
            optax.GradientTransformation(lambda params: optax.EmptyState(), update), 1
        ),
        jnp.ones((MEMBERS, 2)),
    )
    with pytest.raises(
        gradaccum.UsageError,
        match=r"^optimizer: .*reduces over \['members'\].*before tx\.update",
    ):
        jax.vmap(tx.update, axis_name="members")(
            params, jax.vmap(tx.init)(params), params
        )


def test_an_empty_window_is_flushed_beside_an_open_one() -> None:
    """The first member's window has ended, the others' are open: only these say that an
    update was applied.
    """
    tx = gradaccum.wrap(optax.sgd(1.0), steps=4)
    last = jnp.arange(MEMBERS) == 0
    state = jax.vmap(tx.init)(PARAMS)
    _, state = jax.vmap(lambda g, s, p, last: tx.update(g, s, p, last=last))(
        GRADS[0], state, PARAMS, last
    )
    assert gradaccum_jax.result(state).applied.tolist() == [True, False, False]
    flush = jax.vmap(lambda state, params: gradaccum_jax.flush(tx, state, params))
    updates, state = flush(state, PARAMS)
    result = gradaccum_jax.result(state)
    assert result.applied.tolist() == [False, True, True]
    assert result.optimizer_step.tolist() == [1, 1, 1]
    assert updates["w"].any(axis=(1, 2)).tolist() == [False, True, True]
    assert not gradaccum_jax.result(flush(state, PARAMS)[1]).applied.any()
