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
