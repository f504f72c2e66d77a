"""The large batch in one call: loss and gradient are those of `jax.value_and_grad` on
all of it, in float64.
"""

from __future__ import annotations

import enum
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradaccum
import gradaccum_jax
from conformance_tests.framework_tests.jax_large_batch import (
    ITEMS,
    close,
    data,
    errors,
    in_float64,  # noqa: F401
    mean_loss,
    model,
    numbers,
)


class Pair(NamedTuple):
    first: Any
    second: Any


@jax.tree_util.register_pytree_node_class
class Box:
    """A class that the user has made a pytree."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def tree_flatten(self) -> Any:
        return (self.inner,), None

    @classmethod
    def tree_unflatten(cls, _: Any, children: Any) -> Box:
        return cls(*children)


def test_nest_with_an_axis_per_leaf() -> None:
    """Dicts, tuples and own classes; another axis per leaf, also counted from the end;
    whole leaves, a flag among them.
    """
    x, y = data()
    batch = {
        "x": Box(x.T[:, None]),
        "rest": (y, Pair(numbers(2, ITEMS), None)),
        "offset": np.float64(0.5),
        "square": True,
    }
    axes = {"x": -1, "rest": (0, Pair(1, None)), "offset": None, "square": None}

    def loss(params: Any, batch: Any) -> Any:
        found = errors(
            params, batch["x"].inner[:, 0].T + batch["offset"], batch["rest"][0]
        )
        found = found * jnp.sum(batch["rest"][1].first, 0)
        return jnp.mean(found**2 if batch["square"] else found)

    made = gradaccum_jax.value_and_grad(loss, steps=4, axes=(axes,))(model(), batch)
    close(made, jax.value_and_grad(loss)(model(), batch))
    # A flag is a constant of the program: the other one has another program.
    flipped = {
        **batch,
        "square": False,
    }
    step = gradaccum_jax.value_and_grad(loss, steps=4, axes=(axes,))
    step(model(), batch)
    close(step(model(), flipped), jax.value_and_grad(loss)(model(), flipped))


@pytest.mark.parametrize("legacy", [False, True])
def test_every_micro_batch_has_its_own_key(legacy: bool) -> None:
    """Micro-batch i gets fold_in(key, i), the smaller last one too; the same call gives
    the same numbers again.
    """
    key = jax.random.PRNGKey(7) if legacy else jax.random.key(7)
    step = gradaccum_jax.value_and_grad(
        lambda params, x, key: (jnp.sum(params * x), jax.random.normal(key, (1,))),
        has_aux=True,
        aux="concatenate",
        micro_batch_size=4,
        axes=(0, "key") if legacy else 0,
    )
    (_, drawn), _ = step(jnp.ones(()), np.ones(10), key)
    np.testing.assert_array_equal(
        drawn, [jax.random.normal(jax.random.fold_in(key, i), ()) for i in range(3)]
    )
    assert len(set(drawn.tolist())) == 3
    np.testing.assert_array_equal(step(jnp.ones(()), np.ones(10), key)[0][1], drawn)


def test_keys_of_items_are_cut() -> None:
    keys = jax.random.split(jax.random.key(0), 6)

    def loss(params: Any, keys: Any) -> Any:
        return jnp.mean(params * jax.vmap(jax.random.normal)(keys))

    close(
        gradaccum_jax.value_and_grad(loss, steps=3)(jnp.ones(()), keys),
        jax.value_and_grad(loss)(jnp.ones(()), keys),
    )


def test_own_split() -> None:
    """Padding is trimmed to each micro-batch's longest text, so that shapes differ; a
    leaf without items needs no axes=None.
    """
    lengths = np.array([2, 3, 7, 6])
    ids = numbers(4, 7)

    def loss(params: Any, ids: Any, lengths: Any, extra: Any) -> Any:
        mask = jnp.arange(ids.shape[1]) < lengths[:, None]
        return jnp.sum(jnp.sin(params * ids) * mask) / jnp.sum(mask) + extra * params

    def split(ids: Any, lengths: Any, extra: Any, steps: int) -> Any:
        for part in np.array_split(np.arange(4), steps):
            yield ids[part][:, : lengths[part].max()], lengths[part], extra

    step = gradaccum_jax.value_and_grad(
        loss, steps=2, split=split, weight=lambda ids, lengths, extra: lengths.sum()
    )
    close(
        step(jnp.asarray(0.3), ids, lengths, 0.5),
        jax.value_and_grad(loss)(jnp.asarray(0.3), ids, lengths, 0.5),
    )


@pytest.mark.parametrize("argnums", [1, (0, 2), (2, 0)], ids=str)
def test_argnums(argnums: Any) -> None:
    """The batch is what is not differentiated by, in its order."""

    def loss(w: Any, x: Any, v: Any, y: Any) -> Any:
        x, w = (w, x) if argnums == 1 else (x, w)
        return jnp.mean((jnp.tanh(x @ w) @ v - y) ** 2)

    x, y = data()
    given = (
        (x, numbers(3, 4), numbers(4), y)
        if argnums == 1
        else (numbers(3, 4), x, numbers(4), y)
    )
    axes = (0, None, 0) if argnums == 1 else 0
    made = gradaccum_jax.value_and_grad(loss, argnums, steps=4, axes=axes)(*given)
    close(made, jax.value_and_grad(loss, argnums)(*given))


def test_under_jit_and_vmap() -> None:
    step = gradaccum_jax.value_and_grad(mean_loss, steps=4)
    params = jax.tree.map(lambda leaf: jnp.stack([leaf, 2 * leaf, leaf - 1]), model())
    x, y = numbers(3, ITEMS, 3), numbers(3, ITEMS)
    wanted = jax.vmap(jax.value_and_grad(mean_loss))(params, x, y)
    close(jax.jit(jax.vmap(step))(params, x, y), wanted)
    close(jax.vmap(step)(params, x, y), wanted)


def test_second_derivative() -> None:
    """The gradient's norm, differentiated: through the loop, as of the large batch."""

    def norm(value_and_grad: Any) -> Any:
        return jax.grad(
            lambda params: sum(
                jnp.sum(leaf**2)
                for leaf in jax.tree.leaves(value_and_grad(params, *data())[1])
            )
        )(model())

    close(
        norm(gradaccum_jax.value_and_grad(mean_loss, steps=4)),
        norm(jax.value_and_grad(mean_loss)),
        1e-12,
    )


def test_derivative_by_the_weights() -> None:
    """Learning to reweight: the gradient of the loss by the items' weights."""

    def by_weight(weights: Any) -> Any:
        step = gradaccum_jax.value_and_grad(
            lambda params, x: params * jnp.mean(x), micro_batch_size=1, weight=weights
        )
        return step(jnp.asarray(1.0), jnp.asarray([1.0, 2.0, 6.0]))[1]

    # d/dw_i of sum(w x) / sum(w) at w = 1: (x_i - mean) / 3.
    close(jax.grad(by_weight)(jnp.ones(3)), jnp.asarray([-2 / 3, -1 / 3, 1.0]))


@pytest.mark.parametrize("axes", [0, (0, 0), (0, None)])
def test_plain_values_are_given_whole(axes: Any) -> None:
    def loss(params: Any, x: Any, how: Any) -> Any:
        assert how["mask"] is None
        return (
            jnp.mean(params * x)
            * how["scale"]
            * how["power"] ** 2
            * {"twice": 2}[how["mode"]]
        )

    step = gradaccum_jax.value_and_grad(loss, micro_batch_size=2, axes=axes)
    for power in (3, 4):
        found = step(
            jnp.ones(()),
            np.arange(5.0),
            {"scale": 0.5, "power": power, "mode": "twice", "mask": None},
        )
        close(found, (np.float64(2.0 * power**2), np.float64(2.0 * power**2)))


class Kind(enum.IntEnum):
    ONE = 1


@pytest.mark.parametrize("flag", [True, Kind.ONE], ids=["bool", "enum"])
def test_equal_constants_of_two_types_are_told_apart(flag: Any) -> None:
    """``1 == True``, and a loss may ask ``flag is True``."""

    def loss(p: Any, x: Any, flag: Any) -> Any:
        return jnp.mean(x * p) * (1.0 if type(flag) is int else 10.0)

    p, x = jnp.float32(1.0), jnp.ones(4)
    step = gradaccum_jax.value_and_grad(loss, steps=2, axes=(0, None))
    assert [float(step(p, x, given)[0]) for given in (1, flag, 1)] == [1.0, 10.0, 1.0]
    parts = gradaccum_jax.value_and_grad(
        loss, split=lambda x: [(x[:2], 1), (x[2:], flag)]
    )
    assert float(parts(p, x)[0]) == 5.5


def test_flags_and_nests_of_aux() -> None:
    """Each flag merges as a number or as what it says; a declaration may stand for a
    whole nest.
    """
    x = np.arange(10.0) - 20

    def loss(params: Any, x: Any) -> Any:
        aux = {
            "sum": {"x": jnp.sum(x), "flag": jnp.all(x < -12)},
            "mean": (jnp.mean(x), x.shape[0]),
        }
        return params * jnp.mean(x), {
            **aux,
            "max": [jnp.max(x), jnp.any(x == -20)],
            "min": [jnp.min(-x), jnp.all(x < -12)],
        }

    kinds = {"sum": "sum", "mean": ("mean", "mean"), "max": "max", "min": "min"}
    (_, aux), _ = gradaccum_jax.value_and_grad(
        loss, has_aux=True, aux=kinds, micro_batch_size=4
    )(jnp.ones(()), x)
    assert (aux["sum"]["x"], aux["sum"]["flag"]) == (x.sum(), 2)
    close(aux["mean"], (np.float64(x.mean()), np.float64((4 * 4 + 4 * 4 + 2 * 2) / 10)))
    assert [leaf.item() for leaf in (*aux["max"], *aux["min"])] == [
        -11,
        True,
        11,
        False,
    ]


def test_accumulate_dtype() -> None:
    x = jnp.asarray([2.0**24] + [1.0] * 16, jnp.float32)
    step = {
        "loss_fn": lambda params, x: jnp.sum(params * x),
        "micro_batch_size": 1,
        "reduction": "sum",
    }
    narrow = gradaccum_jax.value_and_grad(**step)(jnp.ones((), jnp.float32), x)[1]
    wide = gradaccum_jax.value_and_grad(**step, accumulate_dtype="float64")(
        jnp.ones((), jnp.float32), x
    )[1]
    assert (float(narrow), float(wide)) == (2.0**24, 2.0**24 + 16)
    assert wide.dtype == jnp.float32


def test_complex_parameters() -> None:
    def loss(params: Any, x: Any) -> Any:
        return jnp.mean(jnp.abs(x @ params) ** 2)

    params = jnp.asarray(numbers(3) + 1j * numbers(3, seed=1))
    close(
        gradaccum_jax.value_and_grad(loss, steps=3)(params, numbers(7, 3)),
        jax.value_and_grad(loss)(params, numbers(7, 3)),
    )


def test_integers_and_unused_parameters() -> None:
    """Integers have float0, as `jax.grad` gives them; what the loss does not use has
    zeros; None stays None.
    """
    params = {"w": jnp.ones(3), "n": jnp.arange(2), "unused": jnp.ones(2), "none": None}

    def loss(params: Any, x: Any) -> Any:
        return jnp.mean(x @ params["w"]) * params["n"][1]

    _, made = gradaccum_jax.value_and_grad(loss, steps=2, allow_int=True)(
        params, numbers(4, 3)
    )
    _, wanted = jax.value_and_grad(loss, allow_int=True)(params, numbers(4, 3))
    assert made["n"].dtype == jax.dtypes.float0 == wanted["n"].dtype
    assert made["n"].shape == (2,)
    close({**made, "n": None}, {**wanted, "n": None})


# A whole window of a wrapped optimizer in one call: every option does what it does for
# a window that is streamed.


def test_leaves_that_take_no_part() -> None:
    params = {
        "w": jnp.ones(2),
        "n": jnp.arange(2),
        "key": jax.random.key(0),
        "none": None,
    }
    tx = gradaccum.wrap(optax.sgd(1.0), steps=None)
    step = gradaccum_jax.value_and_update(
        lambda params, x: jnp.mean(x @ params["w"]) * params["n"][1], tx, steps=2
    )
    _, updates, _ = step(params, tx.init(params), np.ones((4, 2)))
    np.testing.assert_array_equal(updates["w"], [-1, -1])
    np.testing.assert_array_equal(updates["n"], [0, 0])
    assert updates["key"] is updates["none"] is None


def test_open_window_belongs_to_the_update() -> None:
    """Two items were streamed before; the call brings four more, and closes the window
    of six.
    """
    tx = gradaccum.wrap(optax.sgd(1.0), steps=None)
    params = jnp.ones(())
    _, state = tx.update(jnp.asarray(5.0), tx.init(params), params, weight=2)
    kinds = jax.tree.map(jax.typeof, state)
    _, updates, state = gradaccum_jax.value_and_update(
        lambda p, x: p * jnp.mean(x), tx, steps=2
    )(params, state, np.full(4, 2.0))
    assert jax.tree.map(jax.typeof, state) == kinds, (
        "a scan over windows takes no others"
    )
    assert float(updates) == -(2 * 5 + 4 * 2) / 6
    assert (int(state.micro_step), int(state.optimizer_step)) == (0, 1)


def test_aux_weights_and_extra_arguments() -> None:
    """Weights of items, an aux, and an argument of the inner optimizer's:
    `optax.scale_by_backtracking_linesearch`-like ones want it.
    """

    def update(
        updates: Any, state: Any, params: Any = None, *, factor: Any, **_: Any
    ) -> Any:
        return jax.tree.map(lambda leaf: -factor * leaf, updates), state

    tx = gradaccum.wrap(
        optax.GradientTransformationExtraArgs(
            lambda params: optax.EmptyState(), update
        ),
        steps=None,
    )
    weights = np.array([1.0, 3.0, 0.0, 1.0])

    def loss(params: Any, x: Any, w: Any) -> Any:
        return params * jnp.sum(x * w) / jnp.sum(w), {"largest": x.max(), "x": x}

    step = gradaccum_jax.value_and_update(
        loss,
        tx,
        True,
        micro_batch_size=3,
        weight=weights,
        aux={"largest": "max", "x": "concatenate"},
    )
    params, x = jnp.asarray(2.0), np.array([1.0, 2.0, 9.0, 4.0])
    (value, aux), updates, _ = step(params, tx.init(params), x, weights, factor=10.0)
    close((value, updates), (jnp.asarray(2 * 11 / 5), jnp.asarray(-10 * 11 / 5)))
    assert aux["largest"] == 9
    np.testing.assert_array_equal(aux["x"], x)


def test_traced_weight_that_is_negative_makes_no_update() -> None:
    """Nobody can look at it: the loss is NaN, and the window ends as one that
    overflowed.
    """
    tx = gradaccum.wrap(optax.sgd(1.0), steps=None)
    step = gradaccum_jax.value_and_update(
        lambda p, x: p * jnp.mean(x), tx, steps=2, weight=lambda x: x[0] - 3
    )
    value, updates, state = step(jnp.ones(()), tx.init(jnp.ones(())), np.ones(4))
    assert np.isnan(value)
    assert updates == 0
    assert gradaccum_jax.result(state).overflow
