"""The large batch in one call: loss and gradient are those of `jax.value_and_grad` on
all of it, in float64.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradaccum
import gradaccum_jax

from .jax_large_batch import (
    ITEMS,
    close,
    data,
    errors,
    in_float64,  # noqa: F401
    mean_loss,
    model,
    numbers,
)

ONE = np.ones(())
X = np.arange(1.0, 7)


class Pair(NamedTuple):
    first: Any
    second: Any


def test_nest_with_an_axis_per_leaf() -> None:
    """Also counted from the end; whole leaves, a flag among them. Each flag has a
    program of its own.
    """
    x, y = data()
    batch = {"x": x.T[:, None], "rest": (y, Pair(numbers(2, ITEMS), None))}
    axes = {"x": -1, "rest": (0, Pair(1, None)), "offset": None, "square": None}

    def loss(params, batch):
        found = errors(params, batch["x"][:, 0].T + batch["offset"], batch["rest"][0])
        found = found * jnp.sum(batch["rest"][1].first, 0)
        return jnp.mean(found**2 if batch["square"] else found)

    step = gradaccum_jax.value_and_grad(loss, steps=4, axes=(axes,))
    for square in (True, False):
        given = {**batch, "offset": np.float64(0.5), "square": square}
        close(step(model(), given), jax.value_and_grad(loss)(model(), given))


@pytest.mark.parametrize("legacy", [False, True])
def test_every_micro_batch_has_its_own_key(legacy: bool) -> None:
    """Micro-batch i gets fold_in(key, i), the smaller last one too; the same call gives
    the same numbers again.
    """
    key = jax.random.PRNGKey(7) if legacy else jax.random.key(7)
    step = gradaccum_jax.value_and_grad(
        lambda params, x, key: (jnp.sum(params * x), jax.random.normal(key)),
        has_aux=True,
        micro_batch_size=4,
        axes=(0, "key") if legacy else 0,
    )
    wanted = [jax.random.normal(jax.random.fold_in(key, i), ()) for i in range(3)]
    for _ in range(2):
        np.testing.assert_array_equal(step(ONE, np.ones(10), key)[0][1], wanted)


def test_under_vmap() -> None:
    step = gradaccum_jax.value_and_grad(mean_loss, steps=4)
    params = jax.tree.map(lambda leaf: jnp.stack([leaf, 2 * leaf, leaf - 1]), model())
    x = numbers(3, ITEMS, 3)
    y = numbers(3, ITEMS)
    wanted = jax.vmap(jax.value_and_grad(mean_loss))(params, x, y)
    close(jax.vmap(step)(params, x, y), wanted)


def test_accumulate_dtype() -> None:
    x = jnp.asarray([2.0**24] + [1.0] * 16, jnp.float32)
    one = jnp.float32(1)
    for dtype, wanted in ((None, 2.0**24), ("float64", 2.0**24 + 16)):
        made = gradaccum_jax.value_and_grad(
            lambda params, x: jnp.sum(params * x),
            micro_batch_size=1,
            reduction="sum",
            accumulate_dtype=dtype,
        )(one, x)[1]
        assert made == wanted
        assert made.dtype == jnp.float32


def test_leaves_that_take_no_part() -> None:
    """Integers have an update of 0; what the loss does not use has zeros; None stays
    None.
    """
    params = {"w": jnp.ones(3), "n": jnp.arange(2), "unused": jnp.ones(2), "none": None}

    def loss(params, x):
        return jnp.mean(x @ params["w"]) * params["n"][1]

    x = numbers(4, 3)
    _, wanted = jax.value_and_grad(loss, allow_int=True)(params, x)
    tx = gradaccum.wrap(optax.sgd(1.0), steps=None)
    held = {**params, "key": jax.random.key(0)}
    step = gradaccum_jax.value_and_update(loss, tx, steps=2)
    _, updates, state = step(held, tx.init(held), x)
    close(updates["w"], -wanted["w"])
    assert updates["unused"].tolist() == [0, 0]
    assert updates["n"].tolist() == [0, 0]
    assert updates["key"] is updates["none"] is None
    moved = gradaccum_jax.apply_updates(held, updates, state)
    assert moved["key"] is held["key"]


def test_open_window_belongs_to_the_update() -> None:
    """Two items were streamed before; the call brings four more, and closes the window
    of six.
    """
    tx = gradaccum.wrap(optax.sgd(1.0), steps=None)
    _, state = tx.update(jnp.asarray(5.0), tx.init(ONE), ONE, weight=2)
    kinds = jax.tree.map(jax.typeof, state)
    _, updates, state = gradaccum_jax.value_and_update(
        lambda p, x: p * jnp.mean(x), tx, steps=2
    )(ONE, state, np.full(4, 2.0))
    # A scan over windows takes no others.
    assert jax.tree.map(jax.typeof, state) == kinds
    assert updates == -(2 * 5 + 4 * 2) / 6
    assert state.micro_step == 0
    assert state.optimizer_step == 1


def test_traced_weight_that_is_negative_shows() -> None:
    """Nobody can look at it: loss and gradient are NaN, and a window ends as one that
    overflowed.
    """

    def loss(params, x):
        return params * jnp.mean(x)

    def first(x):
        return x[0] - 3

    assert np.isnan(
        gradaccum_jax.value_and_grad(loss, steps=2, weight=first)(ONE, X)
    ).all()

    tx = gradaccum.wrap(optax.sgd(1.0), steps=None)
    step = gradaccum_jax.value_and_update(loss, tx, steps=2, weight=first)
    value, updates, state = step(ONE, tx.init(ONE), X)
    assert np.isnan(value)
    assert updates == 0
    assert gradaccum_jax.result(state).overflow


# Keywords of the loss function.


def with_flag(params: Any, x: Any, train: bool = False) -> Any:
    return jnp.mean(params * x) * (3 if train else 1)


def test_keywords_reach_the_loss() -> None:
    """Each value has a program of its own: True is not 1."""
    x = np.ones(6)
    step = gradaccum_jax.value_and_grad(
        lambda p, x, train=False: with_flag(p, x, train is True), steps=3
    )
    for flags, wanted in (({"train": True}, 3), ({"train": 1}, 1), ({}, 1)):
        assert step(ONE, x, **flags) == (wanted, wanted)
    assert jax.jit(lambda x: step(ONE, x, train=True))(x) == (3, 3)
    coupled = gradaccum_jax.coupled_value_and_grad(
        lambda p, x, train=False: p * x * (3 if train else 1),
        lambda p, z: z.mean(),
        steps=3,
    )
    assert coupled(ONE, x, train=True) == (3, 3)


@pytest.mark.parametrize("steps", [2, 4])
def test_arrays_by_keyword_are_cut(steps: int) -> None:
    """Also in nests, with weights by a function of them, and along another axis."""

    def loss_fn(params, *, batch, mask, train=False):
        assert train is True
        products = params * batch["x"] * mask
        return products.sum() / mask.sum()

    x = np.arange(6.0)
    mask = np.array([1.0, 0, 1, 1, 1, 0.5])
    for weight in (lambda batch, mask, train: mask.sum(), mask):
        step = gradaccum_jax.value_and_grad(loss_fn, steps=steps, weight=weight)
        loss, gradient = step(ONE, batch={"x": x}, mask=mask, train=True)
        assert float(loss) == float(gradient) == pytest.approx(11.5 / 4.5)

    def outputs_fn(params, *, x):
        assert x.shape in {(1, math.ceil(6 / steps)), (1, 6 % math.ceil(6 / steps))}
        return params * x.T

    coupled = gradaccum_jax.coupled_value_and_grad(
        outputs_fn, lambda p, z: z.sum() ** 2, steps=steps, axes=1
    )
    assert coupled(ONE, x=x[None]) == (225, 450)


def reading(gradients: Any, state: Any, params: Any = None, *, x: Any) -> Any:
    return jax.tree.map(lambda g: -x * g, gradients), state


def test_keywords_reach_the_loss_or_the_optimizer() -> None:
    """Those that the loss takes go there, optax's own and those that are declared to the
    optimizer, also where the loss has an argument of that name in the batch. If the
    loss takes one of optax's names by keyword, it goes to the loss.
    """
    tx = gradaccum.wrap(
        optax.GradientTransformationExtraArgs(lambda params: (), reading), steps=None
    )
    for loss_fn in (with_flag, lambda p, x, **flags: with_flag(p, x, **flags)):
        step = gradaccum_jax.value_and_update(loss_fn, tx, steps=3)
        value, updates, _ = step(
            ONE, tx.init(ONE), np.ones(6), x=2.0, train=True, value=5.0
        )
        assert value == 3
        assert updates == -6
    sgd = gradaccum.wrap(optax.sgd(1.0), steps=None)
    step = gradaccum_jax.value_and_update(
        lambda p, x, value=0.0: jnp.mean(p * x * value), sgd, steps=3
    )
    x = np.arange(6.0)
    assert step(ONE, sgd.init(ONE), x, value=x)[:2] == (55 / 6, -55 / 6)
