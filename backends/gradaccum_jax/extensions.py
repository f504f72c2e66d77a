"""The window's loss, in the fields ``loss`` and ``last_loss`` of the state. Recording
it changes nothing else in the window.

A loss that was not passed is NaN, which is stored as `state.UNKNOWN`.
"""

from __future__ import annotations

import jax.numpy as jnp

from gradaccum import kit
from gradaccum.kit import Options, Scalar
from gradaccum_jax.arrays import DType
from gradaccum_jax.state import (
    UNKNOWN,
    AccumulationState,
    as_read,
    as_stored,
    like,
)


def first_losses(dtype: DType) -> dict[str, Scalar]:
    """Return the two fields as they are before the first micro-batch."""
    return {"loss": jnp.zeros((), dtype), "last_loss": jnp.full((), UNKNOWN, dtype)}


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
    """Return the state after a window whose loss was `loss`."""
    last_loss = like(as_stored(loss), state.last_loss)
    return discard_loss(state)._replace(last_loss=last_loss)


def discard_loss(state: AccumulationState) -> AccumulationState:
    return state._replace(loss=like(jnp.zeros_like(state.loss), state.loss))
