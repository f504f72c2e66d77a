"""Update the fields ``loss`` (the sum of the open window's losses) and ``last_loss``
(the loss of the last closed window) of an `AccumulationState`. No other field changes.

If any micro-batch was passed without its loss, the window's loss is NaN, which is
stored as `state.UNKNOWN`.
"""

from __future__ import annotations

import jax.numpy as jnp

from gradaccum import kit
from gradaccum.kit import Options, Scalar
from gradaccum_jax.state import UNKNOWN, AccumulationState, as_read, as_stored, like


def add_loss(
    state: AccumulationState,
    loss: Scalar,
    weight: Scalar,
    adds: Scalar,
    options: Options,
) -> AccumulationState:
    if loss is None:
        total = jnp.where(adds, UNKNOWN, state.loss)
    else:
        total = as_stored(
            kit.add_loss(as_read(state.loss), loss, weight, adds, options, jnp.where)
        )
    return state._replace(loss=like(total, state.loss))


def close_loss(state: AccumulationState, loss: Scalar) -> AccumulationState:
    """Store `loss` as the loss of the last closed window, and reset the sum of losses
    for the next window.
    """
    last_loss = like(as_stored(loss), state.last_loss)
    return discard_loss(state)._replace(last_loss=last_loss)


def discard_loss(state: AccumulationState) -> AccumulationState:
    return state._replace(loss=like(jnp.zeros_like(state.loss), state.loss))
