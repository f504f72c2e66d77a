"""`verify_loss_scaling` finds and names a custom backward that ignores the gradient it
gets, and no other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradaccum
from conformance_tests.framework_tests.jax_versions import shard_map
from gradaccum_jax import verify_loss_scaling

MESH, ROWS = (
    jax.sharding.Mesh(jax.devices()[:1], ("devices",)),
    jax.sharding.PartitionSpec("devices"),
)
PARAMS = {"w": jnp.asarray([1.0, 2.0, 3.0]), "index": jnp.asarray(1)}


def custom(name: str, backward: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    def function(x: Any) -> Any:
        return 2 * x

    function.__name__ = name
    with_rule = jax.custom_vjp(function)
    with_rule.defvjp(
        lambda x: (2 * x, x), lambda x, cotangent: (backward(x, cotangent),)
    )
    return with_rule


sound = custom("sound", lambda x, cotangent: 2 * cotangent)
deaf = custom("deaf", lambda x, cotangent: jnp.full_like(x, 2.0))
clipping = custom("clipping", lambda x, cotangent: jnp.clip(cotangent, -1, 1))
partly_deaf = custom("partly_deaf", lambda x, cotangent: 2 * cotangent + 1e-4)


def scanned(function: Any, x: Any) -> Any:
    return jax.lax.scan(lambda carry, _: (function(carry), None), x, None, length=2)[0]


def in_a_branch(function: Any, x: Any) -> Any:
    return jax.lax.cond(jnp.sum(x) > 0, function, lambda x: x, x)


PLACES = {
    "plain": lambda function, x: function(x),
    "jit": lambda function, x: jax.jit(function)(x),
    "remat": lambda function, x: jax.checkpoint(lambda x: function(jnp.sin(x)))(x),
    "scan": scanned,
    "cond": in_a_branch,
    "vmap": lambda function, x: jax.vmap(function)(x),
    "shard_map": lambda function, x: shard_map(
        function, mesh=MESH, in_specs=ROWS, out_specs=ROWS
    )(x),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("function", [deaf, clipping, partly_deaf])
def test_culprit_is_named_in_any_place(place: str, function: Any) -> None:
    report = verify_loss_scaling(
        lambda p: jnp.sum(PLACES[place](function, p["w"]) ** 2), PARAMS
    )
    assert not report.linear
    assert report.culprits == (() if place == "shard_map" else (function.__name__,)), (
        "inside of shard_map the gradients alone tell"
    )
    assert set(report.errors) == {"['w']"}
    assert report.errors["['w']"] > 1e-6


@pytest.mark.parametrize("place", PLACES)
def test_sound_function_is_not_named(place: str) -> None:
    report = verify_loss_scaling(
        lambda p: jnp.sum(PLACES[place](sound, p["w"]) ** 2), PARAMS
    )
    assert report == (True, {"['w']": 0.0}, ())


def test_branch_not_taken_is_checked() -> None:
    report = verify_loss_scaling(
        lambda p: jnp.sum(jax.lax.cond(p["index"] > 5, deaf, lambda x: x, p["w"])),
        PARAMS,
    )
    assert (report.linear, report.culprits, report.errors) == (
        False,
        ("deaf",),
        {"['w']": 0.0},
    )


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
def test_small_half_gradients_are_no_error(dtype: Any) -> None:
    """In float16 they vanish at scale 1. The loss scale is there to prevent that."""
    params, x = jnp.ones((4, 3), dtype), jnp.full((5, 4), 2.0**-12, dtype)

    def loss(w: Any, x: Any) -> Any:
        return jnp.mean(sound((x @ w).astype(dtype)).astype(jnp.float32)) * 1e-4

    assert verify_loss_scaling(loss, params, x) == (True, {"params": 0.0}, ())
    assert verify_loss_scaling(
        lambda w, x: loss(w.astype(dtype), x.astype(dtype)),
        params.astype(jnp.float32),
        x,
    ).linear
    assert verify_loss_scaling(
        lambda w, x: jnp.mean(deaf(x @ w)), params, x
    ).culprits == ("deaf",)


def test_float16_loss_is_linear_below_overflow() -> None:
    params = jnp.asarray([300.0, 200.0], jnp.float32)
    report = verify_loss_scaling(
        lambda w: jnp.sum(sound(w.astype(jnp.float16)) ** 2).astype(jnp.float16),
        params / 16,
    )
    assert report.linear
    report = verify_loss_scaling(
        lambda w: jnp.sum(deaf(w.astype(jnp.float16))).astype(jnp.float16), params
    )
    assert report.culprits == ("deaf",)


def test_functions_are_checked_in_their_dtype() -> None:
    """The loss raises in any other dtype."""
    weights = jnp.ones((2, 2), jnp.bfloat16)

    def loss(x: Any) -> Any:
        return (
            jnp.sum(jax.lax.dot(x, weights).astype(jnp.float32))
            if x.dtype == jnp.bfloat16
            else jax.lax.add(x, weights).sum()
        )

    assert verify_loss_scaling(loss, jnp.ones((2, 2), jnp.bfloat16)).linear


def test_integer_arguments_and_random_keys() -> None:
    @jax.custom_vjp
    def pick(x: Any, index: Any, key: Any) -> Any:
        return x[index] + 0 * jax.random.uniform(key)

    def backward(kept: Any, cotangent: Any) -> Any:
        return jnp.zeros(kept[0]).at[kept[1]].set(cotangent), None, None

    pick.defvjp(
        lambda x, index, key: (pick(x, index, key), (x.shape[0], index)),
        lambda kept, cotangent: (jnp.zeros(3) + cotangent, None, None),
    )
    report = verify_loss_scaling(
        lambda p, key: pick(p["w"], p["index"], key), PARAMS, jax.random.key(3)
    )
    assert report == (True, {"['w']": 0.0}, ())


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.float32])
def test_nan_loss_is_not_linear(dtype: Any) -> None:
    assert not verify_loss_scaling(
        lambda p: jnp.sum(p["w"].astype(dtype) * np.nan), PARAMS
    ).linear


def test_float16_parameters_are_checked_in_float32() -> None:
    """1.3 x 2^-37 becomes 1 float16 subnormal at scale 2^13 and 10 of them at 2^16, not
    8.
    """
    report = verify_loss_scaling(
        lambda w: jnp.sum(w.astype(jnp.float32) * 1.3) * 2.0**-37,
        jnp.ones(2, jnp.float16),
    )
    assert report == (True, {"params": 0.0}, ())


@pytest.mark.parametrize(
    "loss",
    [lambda p: p["w"], lambda p: p["index"], lambda p: (jnp.sum(p["w"]), 1.0)],
    ids=["vector", "int", "aux"],
)
def test_invalid_loss_is_refused(loss: Any) -> None:
    with pytest.raises(
        gradaccum.ArgumentValueError,
        match="loss_fn: expected a function that returns a scalar loss",
    ):
        verify_loss_scaling(loss, PARAMS)
