"""Calls that would give a silently wrong result: each is refused at once, by an error
of its class.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import gradaccum
import gradaccum_jax

PARAMS = {"a": jnp.asarray([1.0, 2.0]), "b": {"c": jnp.asarray([[3.0]])}}
GRADS = jax.tree.map(lambda p: p * 0.25, PARAMS)


def wrap(inner: Any, **options: Any) -> Any:
    return gradaccum.wrap(inner, **{"steps": 4, **options})


@pytest.mark.parametrize(
    ("grads", "message"),
    [
        ({"a": jnp.ones(2)}, r"grads\['b'\]\['c'\]: expected a gradient"),
        (
            {"a": jnp.ones(3), "b": GRADS["b"]},
            r"grads\['a'\]: .*shape \(2,\); got one of shape \(3,\)",
        ),
        (
            {"a": jnp.ones(2, jnp.complex64), "b": GRADS["b"]},
            r"grads\['a'\]: .*complex64",
        ),
        ({"a": "text", "b": GRADS["b"]}, r"grads\['a'\]"),
    ],
    ids=["missing", "shape", "complex", "text"],
)
def test_foreign_gradients_are_refused(grads: Any, message: str) -> None:
    tx = wrap(optax.sgd(1.0))
    with pytest.raises(gradaccum.GradientError, match=message):
        tx.update(grads, tx.init(PARAMS), PARAMS)


def test_traced_weights_must_be_real_scalars() -> None:
    tx = wrap(optax.sgd(1.0))
    for weight in (jnp.ones(2), jnp.asarray(True), jnp.asarray(1j)):
        with pytest.raises(gradaccum.ArgumentTypeError, match="weight"):
            jax.jit(lambda s, w: tx.update(GRADS, s, weight=w))(tx.init(PARAMS), weight)


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: wrap(wrap(optax.sgd(1.0))), gradaccum.ArgumentTypeError),
        (
            lambda: wrap(optax.chain(wrap(optax.sgd(1.0)))).init(PARAMS),
            gradaccum.ArgumentTypeError,
        ),
        (
            lambda: wrap(optax.MultiSteps(optax.sgd(1.0), 2)),
            gradaccum.ArgumentTypeError,
        ),
        (
            lambda: wrap(gradaccum_jax.MultiSteps(optax.sgd(1.0), 2)),
            gradaccum.ArgumentTypeError,
        ),
        (
            lambda: wrap(
                gradaccum_jax.MultiSteps(optax.sgd(1.0), 2).gradient_transformation()
            ),
            gradaccum.ArgumentTypeError,
        ),
        (
            lambda: wrap(optax.MultiSteps(optax.sgd(1.0), 2).gradient_transformation()),
            gradaccum.ArgumentTypeError,
        ),
        (
            lambda: wrap(
                optax.chain(
                    gradaccum_jax.MultiSteps(
                        optax.sgd(1.0), 2
                    ).gradient_transformation()
                )
            ).init(PARAMS),
            gradaccum.ArgumentTypeError,
        ),
        (
            lambda: gradaccum_jax.MultiSteps(optax.chain(wrap(optax.sgd(1.0))), 2).init(
                PARAMS
            ),
            gradaccum.ArgumentTypeError,
        ),
        (
            lambda: jax.jit(
                lambda steps: gradaccum.wrap(optax.sgd(1.0), steps).init(PARAMS)
            )(4),
            gradaccum.ArgumentTypeError,
        ),
        (
            lambda: jax.jit(
                lambda norm: wrap(optax.sgd(1.0), clip_norm=norm).init(PARAMS)
            )(1.0),
            gradaccum.ArgumentTypeError,
        ),
        (lambda: gradaccum.wrap(optax.sgd(1.0)), gradaccum.ArgumentTypeError),
        (
            lambda: wrap(optax.sgd(1.0), accumulate_dtype="float64").init(PARAMS),
            gradaccum.ArgumentValueError,
        ),
        (
            lambda: wrap(optax.sgd(1.0)).update(GRADS, optax.sgd(1.0).init(PARAMS)),
            gradaccum.ArgumentTypeError,
        ),
        (
            lambda: gradaccum_jax.flush(
                optax.sgd(1.0), wrap(optax.sgd(1.0)).init(PARAMS)
            ),
            gradaccum.ArgumentTypeError,
        ),
        (
            lambda: gradaccum_jax.discard(wrap(optax.sgd(1.0)), ()),
            gradaccum.ArgumentTypeError,
        ),
        (lambda: gradaccum_jax.result(()), gradaccum.ArgumentTypeError),
    ],
)
def test_misuse_is_refused(make: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        make()


def test_a_mesh_axis_is_refused_by_a_jax_whose_types_do_not_know_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("gradaccum_jax.workers.group.KNOWS_AXES", False)
    for call in (
        lambda: gradaccum.wrap(optax.sgd(0.1), steps=2, axis_name="data"),
        lambda: gradaccum_jax.value_and_grad(
            lambda p, x: p * x, steps=2, axis_name="data"
        ),
        lambda: gradaccum_jax.data_parallel(
            lambda p: p, jax.make_mesh((1,), ("data",)), "data"
        ),
    ):
        with pytest.raises(
            gradaccum.UsageError, match=f"jax.shard_map.*{jax.__version__}"
        ):
            call()


@pytest.mark.parametrize(
    "call",
    [
        lambda tx, state: gradaccum_jax.result(state),
        lambda tx, state: gradaccum_jax.describe(state),
        lambda tx, state: gradaccum_jax.scale_loss(1.0, state),
        lambda tx, state: gradaccum_jax.apply_updates(PARAMS, GRADS, state),
        lambda tx, state: gradaccum_jax.discard(tx, state),
        lambda tx, state: gradaccum_jax.flush(tx, state, PARAMS),
        lambda tx, state: tx.update(GRADS, state, PARAMS),
    ],
)
def test_state_of_shapes_is_refused(call: Any) -> None:
    """Where they are traced, shapes are a state like any other."""
    tx = wrap(optax.adam(1.0))
    state = jax.eval_shape(tx.init, PARAMS)
    with pytest.raises(
        gradaccum.ArgumentTypeError, match=r"^state: expected a state of arrays.*shapes"
    ):
        call(tx, state)
    with pytest.raises(gradaccum.CheckpointError, match="expected an array; got its"):
        gradaccum_jax.check_state(tx, state, PARAMS)
    made = jax.eval_shape(gradaccum_jax.result, state)
    assert made.applied.dtype == bool
