"""The loss of a window.

Losses have the derivative that gradients have, at weight 0 too. A loss that was not
passed is NaN, stored as `state.UNKNOWN` says.
"""

from __future__ import annotations

import jax.numpy as jnp

from gradaccum import kit
from gradaccum.kit import Options, Scalar
from gradaccum_jax.arrays import DType, Tree
from gradaccum_jax.gradient_sum import passing
from gradaccum_jax.state import (
    UNKNOWN,
    AccumulationState,
    all_like,
    as_read,
    as_stored,
    like,
)


def fresh(dtype: DType) -> dict[str, Tree]:
    """Return the fields before the first micro-batch, by name."""
    return {
        "loss": jnp.zeros((), dtype),
        "last_loss": jnp.full((), UNKNOWN, dtype),
    }


def add(
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
            kit.add_loss(
                as_read(state.loss),
                loss,
                weight,
                adds,
                options,
                passing(adds | (weight == 0)),
            )
        )
    return state._replace(loss=like(total, state.loss))


def close(state: AccumulationState, loss: Scalar) -> AccumulationState:
    """Return the state after a window of this `loss`."""
    held, last = all_like(
        (jnp.zeros_like(state.loss), as_stored(loss)), (state.loss, state.last_loss)
    )
    return state._replace(loss=held, last_loss=last)


def discard(state: AccumulationState) -> AccumulationState:
    return state._replace(loss=jnp.zeros_like(state.loss))
