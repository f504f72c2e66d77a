"""A large batch that is spread over four devices: each computes its part, and what is
added up over the devices is so once per call.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import gradaccum_jax

from ..jax_large_batch import close, data, errors, mean_loss, model, numbers
from .common import COLLECTIVE, DEVICES, P, inside

ITEMS = 24
X, Y = data(ITEMS)
TOKENS = np.arange(ITEMS) % 7
SPREAD = P("data")
# XLA for the CPU makes one collective of many from JAX 0.10 on; before, one for each
# tensor, one for the loss and one for the weight.
ONCE = ["all-reduce"] * (1 if jax.__version_info__ >= (0, 10) else 5)


def one_reduction_per_call() -> None:
    """Also with a smaller last micro-batch."""
    wanted = jax.value_and_grad(mean_loss)(model(), X, Y)
    for steps in (1, 6, 4):
        call = gradaccum_jax.value_and_grad(mean_loss, steps=steps, axis_name="data")
        step = inside(call, (P(), SPREAD, SPREAD))
        close(step(model(), X, Y), wanted)
        text = step.lower(model(), X, Y).compile().as_text()
        assert COLLECTIVE.findall(text) == ONCE


def gathered_parameters() -> None:
    """Parameters are sharded, the user gathers them, and the call is told no axis."""

    def loss(w: Any, x: Any) -> Any:
        return jnp.mean(jnp.tanh(x @ w).sum(1) ** 2)

    def gathering(w: Any, x: Any) -> Any:
        def gathered(w: Any, x: Any) -> Any:
            return loss(jax.lax.all_gather(w, "data", tiled=True), x)

        value, gradient = gradaccum_jax.value_and_grad(gathered, steps=3)(w, x)
        return jax.lax.pmean(value, "data"), gradient / DEVICES

    given = jnp.asarray(numbers(DEVICES, 3)), numbers(ITEMS, DEVICES)
    made = inside(gathering, SPREAD, (P(), SPREAD))(*given)
    close(made, jax.value_and_grad(loss)(*given))


def weights_and_aux() -> None:
    """Tokens differ between devices, which share the loss; aux is each device's own,
    along another axis too.
    """

    def loss(params: Any, x: Any, y: Any, tokens: Any) -> Any:
        found = errors(params, x.T, y)
        return jnp.sum(found * tokens) / jnp.sum(tokens), found

    call = gradaccum_jax.value_and_grad(
        loss,
        micro_batch_size=4,
        axis_name="data",
        has_aux=True,
        merge_aux="concatenate",
        axes=(1, 0, 0),
        weight=lambda x, y, tokens: tokens.sum(),
    )
    step = inside(call, (P(), P(None, "data"), SPREAD, SPREAD), ((P(), SPREAD), P()))
    given = X.T, Y, TOKENS
    close(
        step(model(), *given), jax.value_and_grad(loss, has_aux=True)(model(), *given)
    )


def keys() -> None:
    """They differ between devices."""

    def loss(params: Any, x: Any, key: Any) -> Any:
        return jnp.mean(params * x), jax.random.key_data(key)

    key = jax.random.key(5)
    call = gradaccum_jax.value_and_grad(loss, has_aux=True, steps=2, axis_name="data")
    step = inside(call, (P(), SPREAD, P()), ((P(), SPREAD), P()))
    drawn = step(jnp.ones(()), np.ones(16), key)[0][1]
    wanted = [jax.random.fold_in(key, i) for i in range(2 * DEVICES)]
    np.testing.assert_array_equal(drawn, [jax.random.key_data(key) for key in wanted])


def coupled() -> None:
    """The outputs of all devices are gathered; the loss's own parameter is
    differentiated once, not once per device.
    """
    params = {"w": jnp.asarray(numbers(3, 2)), "temperature": jnp.asarray(0.3)}

    def outputs(params: Any, x: Any) -> Any:
        return jnp.tanh(x @ params["w"])

    def loss(params: Any, z: Any) -> Any:
        logits = jax.nn.log_softmax(z @ z.T * jnp.exp(params["temperature"]))
        return -jnp.mean(jnp.diag(logits)), z.std()

    call = gradaccum_jax.coupled_value_and_grad(
        outputs, loss, has_aux=True, steps=2, axis_name="data"
    )

    def whole(params: Any) -> Any:
        return loss(params, outputs(params, X))

    made = inside(call, (P(), SPREAD))(params, X)
    close(made, jax.value_and_grad(whole, has_aux=True)(params))
