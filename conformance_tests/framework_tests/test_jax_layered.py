"""The layered window has the numbers of the usual one: draws, weights, tied parameters,
masters; what it keeps in memory.
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

from .jax_large_batch import in_float64  # noqa: F401

LAYERS = 4
WIDTH = 8
RNG = np.random.default_rng(0)
Tree = Any


def drawn(*shape: int) -> Any:
    return RNG.normal(size=shape) / np.sqrt(shape[-1])


# An autoencoder, whose first and last matrix are one. Beside the activations it passes
# on which items count; they have no gradient, and the layers' numbers are integers.


def prelude(outer: Tree, x: Any, counts: Any, key: Any) -> Any:
    w = outer["w"]
    return {"x": x.astype(w.dtype) @ w + outer["bias"], "counts": counts}


def block(own: Tree, given: Any, x: Any, counts: Any, key: Any) -> Any:
    made = jnp.tanh(given["x"] @ own["w"]) * own["scale"]
    return {
        **given,
        "x": given["x"] + made * jax.random.bernoulli(key, 0.8, made.shape),
    }


def loss_fn(outer: Tree, given: Any, x: Any, counts: Any, key: Any) -> Any:
    made = given["x"] * outer["scale"] @ outer["w"].T
    errors = jnp.sum((made.astype(x.dtype) - x) ** 2, -1)
    counts = given["counts"]
    loss = jnp.sum(counts * errors) / jnp.maximum(counts.sum(), 1)
    return loss, {"counted": counts.sum(), "largest": errors.max()}


def autoencoder(
    layers: int = LAYERS, width: int = WIDTH, dtype: Any = np.float64
) -> Tree:
    stacked = {"w": drawn(layers, width, width), "scale": np.ones((layers, width))}
    outer = {"bias": drawn(width), "scale": np.ones(width), "w": drawn(3, width)}
    params = jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype), (outer, stacked))
    params[1]["number"] = jnp.arange(layers, dtype=jnp.int32)
    return params


def whole(params: Tree, x: Any, counts: Any, key: Any) -> Any:
    """The same model in the usual order."""
    outer, layers = params

    @jax.checkpoint
    def body(given: Any, own: Tree) -> Any:
        own_key = jax.random.fold_in(key, own["number"] + 1)
        return block(own, given, x, counts, own_key), None

    given = jax.lax.scan(body, prelude(outer, x, counts, None), layers)[0]
    return loss_fn(outer, given, x, counts, None)


OPTIONS: dict[str, Any] = {
    "has_aux": True,
    "steps": 4,
    "weight": lambda x, counts, key: counts.sum(),
}


def wrap(inner: Any, **options: Any) -> Any:
    return gradaccum.wrap(inner, steps=None, **options)


def layered(tx: Any, layer: Any = block, **options: Any) -> Any:
    return gradaccum_jax.layered_value_and_update(
        prelude, layer, loss_fn, tx, **OPTIONS | options
    )


def usual(tx: Any, **options: Any) -> Any:
    call = gradaccum_jax.value_and_update(whole, tx, **OPTIONS | options)

    def step(params: Tree, state: Tree, *batch: Any) -> Any:
        loss, updates, state = call(params, state, *batch)
        return loss, gradaccum_jax.apply_updates(params, updates, state), state

    return step


def two_windows(step: Any, params: Tree, state: Tree, *batch: Any) -> Any:
    """Parameters, the window's numbers, loss and aux."""
    step = jax.jit(step)
    for number in range(2):
        loss, params, state = step(params, state, *batch, jax.random.key(number))
    numbers = state._replace(accumulator=None, inner_state=None, masters=None)
    return params, numbers, loss


def require_close(made: Any, wanted: Any, most: float = 1e-12) -> None:
    for a, b in zip(*map(jax.tree.leaves, (made, wanted)), strict=True):
        np.testing.assert_allclose(np.float64(a), np.float64(b), rtol=most, atol=most)


@pytest.mark.every_mode
def test_numbers_of_the_usual_window() -> None:
    """The two gradients of tied parameters are added up in another order. No item of
    the second micro-batch counts.
    """
    tx = wrap(optax.adamw(1e-2), on_overflow="ignore", loss_scale=8.0)
    params = autoencoder()
    batch = drawn(8, 3), np.array([1, 1, 0, 0, 1, 0, 1, 1.0])
    step = layered(tx)
    made = two_windows(step, params, step.init(params), *batch)
    require_close(made, two_windows(usual(tx), params, tx.init(params), *batch))
    assert gradaccum_jax.result(made[1]).optimizer_step == 2


@pytest.mark.slow
@pytest.mark.every_mode
def test_masters_by_layer() -> None:
    """XLA rounds half precision where it likes. A short last micro-batch."""
    tx = wrap(optax.adamw(1e-2), on_overflow="ignore", master_weights=True)
    params = autoencoder(dtype=jnp.bfloat16)
    batch = (drawn(11, 3), np.ones(11))
    step = layered(tx)
    made = two_windows(step, params, step.init(params), *batch)
    require_close(made, two_windows(usual(tx), params, tx.init(params), *batch), 1e-2)


@pytest.mark.slow
def test_memory_is_that_of_a_layer() -> None:
    """The usual window's sums grow with the layers; here the activations at the borders
    do.
    """
    layers = 16
    width = 128
    tx = wrap(optax.adamw(1e-2), on_overflow="ignore")
    params = autoencoder(layers, width, jnp.float32)
    batch = np.ones((16, 3), np.float32), np.ones(16, np.float32), jax.random.key(0)

    def needed(step, state):
        """Beside the donated parameters and moments."""
        call = jax.jit(step, donate_argnums=(0, 1)).lower(params, state, *batch)
        held = call.compile().memory_analysis()
        kept = jax.tree.leaves((params, state._replace(accumulator=None)))
        return (
            held.argument_size_in_bytes
            + held.output_size_in_bytes
            - held.alias_size_in_bytes
            + held.temp_size_in_bytes
            - sum(leaf.nbytes for leaf in kept)
        )

    step = layered(tx, steps=16)
    border = 4 * 16 * width
    assert needed(step, step.init(params)) < 28 * width**2 + 3 * layers * border
    assert needed(usual(tx, steps=16), tx.init(params)) > layers * 4 * width**2


INSEPARABLE = {
    "a norm of all": lambda: optax.chain(
        optax.clip_by_global_norm(1e9), optax.sgd(0.1)
    ),
    "after NaN is taken out": lambda: optax.chain(
        optax.zero_nans(), optax.clip_by_global_norm(1.0), optax.sgd(0.1)
    ),
    "the same noise for each layer": lambda: optax.chain(
        optax.add_noise(1.0, 0.5, 0), optax.sgd(0.1)
    ),
}
BATCH = np.ones((8, 3), np.float32), np.ones(8, np.float32), jax.random.key(0)


@pytest.mark.every_mode
@pytest.mark.parametrize("kind", INSEPARABLE)
def test_inseparable_optimizers_are_refused(kind: str) -> None:
    step = layered(wrap(INSEPARABLE[kind](), on_overflow="ignore"))
    words = "tx: expected an optimizer that can update each layer independently"
    for dtype in (jnp.float32, jnp.bfloat16):
        params = autoencoder(3, 8, dtype)
        del params[1]["number"]  # optax itself refuses integers here
        with pytest.raises(gradaccum.UsageError, match=f"^{words}"):
            jax.eval_shape(step, params, step.init(params), *BATCH)
