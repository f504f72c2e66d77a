"""Gradients typed ``unreduced`` on explicit meshes of four host devices: run by
`test_jax_explicit_mesh`, ``python FILE CHECK``.

A process of its own: the number of devices is fixed when JAX starts.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradaccum
import gradaccum_jax
from conformance_tests.framework_tests.jax_versions import on_mesh
from gradaccum_jax.sharding import reshard

P: Any = jax.sharding.PartitionSpec
DATA = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))
WHOLE = jax.NamedSharding(DATA, P())
BATCHES = np.asarray(np.random.default_rng(0).normal(size=(3, 8, 6)), np.float32)
SPREAD = [
    jax.device_put(batch, jax.NamedSharding(DATA, P("data", None))) for batch in BATCHES
]
WRAPPED = [
    gradaccum.wrap(optax.sgd(0.5), steps=3),
    gradaccum.wrap(optax.sgd(0.5), steps=None, on_overflow="ignore"),
    gradaccum.wrap(
        optax.sgd(0.5),
        steps=3,
        on_overflow="drop_micro_batch",
        accumulate_dtype="float32",
    ),
    gradaccum_jax.MultiSteps(optax.sgd(0.5), 3),
]


def parts(x: Any) -> Any:
    """Each device's part of a gradient."""
    return {
        "v": None,
        "w": jnp.einsum(
            "bi,bj->ij", x, x[:, :4], out_sharding=P(None, None, unreduced={"data"})
        ),
    }


def reduced(params: Any) -> Any:
    """The parameters in the type whose gradients are such parts."""
    return jax.tree.map(
        lambda leaf: reshard(leaf, P(*(None,) * leaf.ndim, reduced={"data"})), params
    )


def parameters() -> Any:
    return {
        name: jax.device_put(jnp.ones(shape), WHOLE)
        for name, shape in (("v", (4,)), ("w", (6, 4)))
    }


def refused(call: Callable[..., Any], *arguments: Any, match: str) -> None:
    """Raises at once in the traced program, and outside of `jax.jit` where this JAX has
    such arrays there.
    """
    kinds = (gradaccum.GradientError, gradaccum.ArgumentTypeError)
    with pytest.raises(kinds, match=match + r".*jax\.reshard.*data_parallel"):
        jax.jit(call)(*arguments)
    if jax.__version_info__ >= (0, 10):
        with pytest.raises(kinds, match=match):
            call(*arguments)


def check_gradients() -> None:
    """Whatever the options; the state is as it was."""
    with on_mesh(DATA):
        params = parameters()
        for tx in WRAPPED:
            state = tx.init(params)
            refused(
                lambda x, tx=tx, state=state: tx.update(parts(x), state, params),
                SPREAD[0],
                match=r"^grads\['w'\]: expected .*added up",
            )
        whole = gradaccum.wrap(optax.sgd(0.5), steps=None)
        state = whole.init(params)
        by_itself = gradaccum_jax.value_and_update(
            lambda params, x: jnp.mean(x @ params["w"]), whole, steps=2
        )
        refused(
            lambda params, x: by_itself(reduced(params), state, x),
            params,
            SPREAD[0],
            match=r"^params\['v'\]: expected .*ordinary",
        )


def check_parameters() -> None:
    """In every call that takes them."""
    tx = gradaccum.wrap(optax.adamw(0.5), steps=3)
    with on_mesh(DATA):
        params, x = parameters(), SPREAD[0]
        grads, state = jax.tree.map(jnp.ones_like, params), tx.init(params)
        coupled = gradaccum_jax.coupled_value_and_grad(
            lambda params, x: x @ params["w"], jnp.mean, steps=2
        )
        for call in (
            lambda params: tx.init(reduced(params)),
            lambda params: gradaccum_jax.MultiSteps(optax.sgd(0.5), 2).init(
                reduced(params)
            ),
            lambda params: tx.update(grads, state, reduced(params)),
            lambda params: gradaccum_jax.flush(tx, state, reduced(params)),
            lambda params: gradaccum_jax.value_and_grad(loss, steps=2)(
                reduced(params), x
            ),
            lambda params: coupled(reduced(params), x),
        ):
            refused(
                call,
                params,
                match=(
                    r"^(params|argument 0)\['v'\]: expected a parameter of an ordinary"
                    r" type"
                ),
            )


def loss(params: Any, x: Any) -> Any:
    return jnp.mean(x @ params["w"]) + 0 * jnp.sum(params["v"])


def check_added_up() -> None:
    """As the error says: the window of gradients that are added up is that of the large
    batch.
    """
    tx = gradaccum.wrap(optax.sgd(1.0), steps=3, clip_norm=10.0)
    with on_mesh(DATA):
        params = parameters()
        state = tx.init(params)

        @jax.jit
        def step(state: Any, x: Any) -> Any:
            grads = {"v": None, "w": reshard(parts(x)["w"], P())}
            return tx.update(grads, state, params)

        for x in SPREAD:
            updates, state = step(state, x)
    mean = np.mean([x.T @ x[:, :4] for x in BATCHES], axis=0)
    norm = np.linalg.norm(mean)
    np.testing.assert_allclose(gradaccum_jax.result(state).grad_norm, norm, rtol=1e-5)
    np.testing.assert_allclose(
        np.asarray(updates["w"]), -mean * min(1, 10 / norm), rtol=1e-4, atol=1e-5
    )


if __name__ == "__main__":
    globals()[f"check_{sys.argv[1]}"]()
