"""Calls of the large batch that make no sense: each is refused by name, with what to
write instead.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental import sparse

import gradaccum
import gradaccum_jax

VALUE, TYPE = gradaccum.ArgumentValueError, gradaccum.ArgumentTypeError
X = np.ones((6, 2), np.float32)


def loss(params: Any, *batch: Any) -> Any:
    return jnp.mean(params * jax.tree.leaves(batch)[0])


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"steps": 2, "argnums": -1}, VALUE, "argnums"),
        ({"steps": 2, "argnums": (0, 0)}, VALUE, "argnums"),
        ({"steps": 2, "argnums": "params"}, TYPE, "argnums"),
        ({"steps": 2, "has_aux": True}, VALUE, "aux: expected how aux merges"),
        ({"steps": 2, "aux": "sum"}, VALUE, "has_aux"),
        ({"steps": 2, "accumulate_dtype": int}, TYPE, "accumulate_dtype"),
    ],
)
def test_options_that_make_no_sense(options: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        gradaccum_jax.value_and_grad(loss, **options)


@pytest.mark.parametrize(
    ("batch", "options", "error", "message"),
    [
        (
            (X, [True] * 6),
            {},
            VALUE,
            r"batch\[1\]\[0\]: expected an array with an axis 0.*a bool.*a list",
        ),
        (
            (X, {"y": (0.5, 0.5)}),
            {},
            VALUE,
            r"batch\[1\]\['y'\]\[0\]: expected an array with an axis 0",
        ),
        (
            (X, sparse.BCOO.fromdense(X)),
            {},
            VALUE,
            r"batch\[1\]: expected a dense array to split; got a BCOO",
        ),
        ((X,), {"axes": "key"}, TYPE, r"batch\[0\]: expected one random key"),
        ((X,), {"weight": np.ones(6, complex)}, TYPE, "weight: expected real numbers"),
    ],
)
def test_batches_that_cannot_be_divided(
    batch: Any, options: Any, error: Any, message: str
) -> None:
    with pytest.raises(error, match=message):
        gradaccum_jax.value_and_grad(loss, **{"steps": 2, **options})(
            jnp.ones(()), *batch
        )


@pytest.mark.parametrize(
    ("made", "options", "message"),
    [
        (lambda p, x: jnp.argmax(x), {}, "loss_fn: expected .*dtype int"),
        (lambda p, x: None, {}, "loss_fn: expected .*nothing"),
        (
            lambda p, x: (p * x.sum(), {"a": x}),
            {"has_aux": True, "aux": {"b": "sum"}},
            "aux: expected a prefix",
        ),
        (
            lambda p, x: (p * x.sum(), jax.random.key(0)),
            {"has_aux": True, "aux": "max"},
            "aux: expected numbers to merge by 'max'",
        ),
    ],
)
def test_losses_that_are_not_as_declared(made: Any, options: Any, message: str) -> None:
    with pytest.raises(VALUE, match=message):
        gradaccum_jax.value_and_grad(made, steps=2, **options)(jnp.ones(()), X)


def test_integers_to_differentiate_by() -> None:
    with pytest.raises(
        TYPE,
        match=(
            r"argument 0\['n'\]: expected a float to differentiate by; got"
            r" int32.*allow_int=True"
        ),
    ):
        gradaccum_jax.value_and_grad(lambda p, x: p["w"] * x.sum(), steps=2)(
            {"w": jnp.ones(()), "n": jnp.arange(2)}, X
        )


def calls(alone: Any) -> list[Any]:
    """Every call that differentiates, of parameters and a batch; `alone` makes the
    parameters that an optimizer has.
    """
    tx = gradaccum.wrap(optax.sgd(1.0), steps=None)
    return [
        gradaccum_jax.value_and_grad(loss, steps=2, allow_int=True),
        lambda p, x: gradaccum_jax.value_and_update(loss, tx, steps=2)(
            p, tx.init(alone(p)), x
        ),
        lambda p, x: gradaccum_jax.coupled_value_and_grad(
            lambda p, x: x, lambda p, z: z.mean(), steps=2
        )(p, x),
    ]


def test_models_that_hold_functions() -> None:
    """An equinox model has its activation among its leaves."""
    model = {"w": jnp.ones(()), "activation": jax.nn.relu}
    for call in [
        *calls(lambda p: p["w"]),
        lambda p, _: gradaccum.wrap(optax.sgd(1.0), steps=2).init(p),
    ]:
        with pytest.raises(
            TYPE,
            match=(
                r"\['activation'\]: expected arrays alone; got a"
                r" .*eqx\.partition\(model, eqx\.is_inexact_array\)"
            ),
        ):
            call(model, X)


def test_modules_with_random_streams() -> None:
    """Each micro-batch would start from the same count: one dropout mask for all. What
    the error says to write has one for each.
    """
    nnx = pytest.importorskip("flax.nnx", reason="flax is not installed")
    model = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
    for call in calls(lambda p: jnp.ones(())):
        with pytest.raises(
            TYPE,
            match=(
                r"argument 0.*: expected parameters alone; got a random"
                r" stream.*nnx\.split\(.*copy=True\)"
            ),
        ):
            call(model, X)
    graph, params, rest = nnx.split(model, nnx.Param, ...)

    def dropped(w: Any, x: Any, key: Any) -> Any:
        merged = nnx.merge(graph, params, rest, copy=True)
        nnx.reseed(merged, default=key)
        return w * x.mean(), merged(x)

    call = gradaccum_jax.value_and_grad(
        dropped, steps=3, has_aux=True, aux="concatenate"
    )
    masks = np.asarray(
        call(jnp.ones(()), np.ones((24, 4), np.float32), jax.random.key(0))[0][1]
    ).reshape(3, -1)
    assert len(np.unique(masks, axis=0)) == 3


def test_too_few_arguments() -> None:
    with pytest.raises(
        VALUE, match="argnums: expected an argument number 3; got 2 arguments"
    ):
        gradaccum_jax.value_and_grad(loss, 3, steps=2)(jnp.ones(()), X)


def test_traced_weights_that_are_negative_show() -> None:
    """Nobody can look at them: loss and gradient become NaN."""
    step = gradaccum_jax.value_and_grad(loss, steps=2, weight=lambda x: x[0, 0] - 2)
    assert np.isnan(step(jnp.ones(()), X)).all()

    def given(weights: Any) -> Any:
        return gradaccum_jax.value_and_grad(
            loss, steps=2, weight=weights, reduction="sum"
        )(jnp.ones(()), X)

    assert np.isnan(jax.jit(given)(jnp.asarray([1.0, 1, 1, -5, 1, 1]))).all()


def test_packing_by_traced_weights() -> None:
    for weight in (None, lambda x: x.sum()):

        def packed(weights: Any, weight: Any = weight) -> Any:
            step = gradaccum_jax.value_and_grad(
                loss, micro_batch_weight=3, weight=weights if weight is None else weight
            )
            return step(jnp.ones(()), jnp.asarray(X) * weights[:, None])

        with pytest.raises(
            TYPE,
            match=(
                r"micro_batch_weight: expected per-item weights known.*outside of"
                r" jax.jit"
            ),
        ):
            jax.jit(packed)(jnp.ones(6))


def test_optimizers_that_close_windows_themselves() -> None:
    with pytest.raises(
        VALUE,
        match=(
            "tx: expected one wrapped with steps=None, as this call closes the window;"
            " got steps=4"
        ),
    ):
        gradaccum_jax.value_and_update(
            loss, gradaccum.wrap(optax.sgd(1.0), steps=4), steps=2
        )
    with pytest.raises(TYPE, match="tx: expected a wrapped optimizer"):
        gradaccum_jax.value_and_update(loss, optax.sgd(1.0), steps=2)


def test_state_of_other_parameters() -> None:
    tx = gradaccum.wrap(optax.sgd(1.0), steps=None)
    step = gradaccum_jax.value_and_update(
        lambda p, x: jnp.mean(p["w"] * x), tx, steps=2
    )
    with pytest.raises(TYPE, match="state"):
        step({"w": jnp.ones(2)}, None, X)
    with pytest.raises(gradaccum.GradientError, match=r"grads\['w'\]"):
        step({"w": jnp.ones(2)}, tx.init({"w": jnp.ones(1)}), X)


def test_coupled_weights_that_nothing_asks_for() -> None:
    """They would be dropped silently: the loss is taken over all rows at once."""
    with pytest.raises(
        VALUE, match=r"weight: expected none, or micro_batch_weight.*inside of loss_fn"
    ):
        gradaccum_jax.coupled_value_and_grad(
            lambda p, x: p * x, lambda p, o: o.sum(), steps=2, weight=np.ones(6)
        )


def test_integers_among_coupled_parameters() -> None:
    with pytest.raises(
        gradaccum.ArgumentTypeError,
        match=r"argument 0\['n'\]: expected a float.*close over it",
    ):
        gradaccum_jax.coupled_value_and_grad(
            lambda p, x: p["w"] * x, lambda p, o: o.sum(), steps=2
        )({"w": jnp.ones(()), "n": 1}, X)


# Keywords of the loss function.


def with_flag(params: Any, x: Any, train: bool = False) -> Any:
    return jnp.mean(params * x) * (3 if train else 1)


def test_keywords_reach_the_loss() -> None:
    """Each value has a program of its own: True is not 1."""
    step = gradaccum_jax.value_and_grad(with_flag, steps=3)
    params = jnp.ones(())
    assert [float(step(params, X, train=flag)[0]) for flag in (True, False)] == [3, 1]
    assert [float(step(params, X)[0]), float(step(params, X, train=1)[0])] == [1, 3]
    assert float(step(params, X, train=True)[1]) == 3
    jitted = jax.jit(lambda params, x: step(params, x, train=True)[0])
    assert float(jitted(params, X)) == 3
    coupled = gradaccum_jax.coupled_value_and_grad(
        lambda p, x, train=False: p * x * (3 if train else 1),
        lambda p, z: z.mean(),
        steps=3,
    )
    assert float(coupled(params, X, train=True)[0]) == 3
    sized = gradaccum_jax.value_and_grad(
        with_flag, micro_batch_size=gradaccum.AutoMicroBatchSize(memory_limit=10**8)
    )
    assert float(sized(params, X, train=True)[0]) == 3


@pytest.mark.parametrize(
    "inner", [optax.sgd(1.0), optax.scale(-1.0)], ids=["any extra", "none"]
)
def test_keywords_of_one_call_reach_the_loss_or_the_optimizer(inner: Any) -> None:
    """Those that the loss takes go there, optax's own to the optimizer, and the rest
    nowhere.
    """
    tx = gradaccum.wrap(inner, steps=None)
    params = jnp.ones(())
    for loss_fn in (with_flag, lambda p, x, **flags: with_flag(p, x, **flags)):
        step = gradaccum_jax.value_and_update(loss_fn, tx, steps=3)
        value, updates, _ = step(params, tx.init(params), X, train=True, value=5.0)
        assert (float(value), float(updates)) == (3, -3)
        assert float(step(params, tx.init(params), X)[0]) == 1
    step = gradaccum_jax.value_and_update(with_flag, tx, steps=3)
    with pytest.raises(
        TYPE, match=r"^trian: expected an argument of the loss function, or one that"
    ):
        step(params, tx.init(params), X, trian=True)
    with pytest.raises(TYPE, match=r"^weight: .*belong to tx\.update"):
        step(params, tx.init(params), X, weight=3.0)


def test_keywords_that_are_declared_reach_the_optimizer() -> None:
    """In a chain too, with one loss that has an argument of that name in the batch."""

    def update(gradients: Any, state: Any, params: Any = None, *, x: Any) -> Any:
        return jax.tree.map(lambda g: -x * g, gradients), state

    reading = optax.GradientTransformationExtraArgs(lambda params: (), update)
    tx = gradaccum.wrap(optax.chain(reading), steps=None)
    step = gradaccum_jax.value_and_update(with_flag, tx, steps=3)
    params = jnp.ones(())
    value, updates, _ = step(params, tx.init(params), X, x=2.0, train=True)
    assert (float(value), float(updates)) == (3, -6)


def test_arrays_by_keyword_are_refused() -> None:
    """Nobody says whether each micro-batch gets a part of them, or all."""
    tx = gradaccum.wrap(optax.sgd(1.0), steps=None)
    params = jnp.ones(())
    calls: list[Any] = [
        gradaccum_jax.value_and_grad(with_flag, steps=3),
        lambda p, x, **flags: gradaccum_jax.value_and_update(with_flag, tx, steps=3)(
            p, tx.init(p), x, **flags
        ),
    ]
    for call in calls:
        for value in (
            jnp.ones(6),
            np.ones(6),
            np.bool_(True),
            {"a": 1},
            (jnp.ones(1),),
        ):
            with pytest.raises(
                TYPE, match=r"^train: expected a constant, such as True.*by position"
            ):
                call(params, X, train=value)
