"""The statistics of a window: the loss of its micro-batches, and the gradient noise.

Losses have the derivative that gradients have, at weight 0 too. A loss that was not
passed is NaN, stored as `state.UNKNOWN` says. The noise scale needs one norm more per
window, after its first micro-batch. It is no part of any derivative.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax

from gradaccum import kit
from gradaccum.kit import Fields, Noise, Options, Scalar
from gradaccum_jax.arrays import DType, Tree
from gradaccum_jax.control_flow import once
from gradaccum_jax.sharding import ShardAxes
from gradaccum_jax.sums import measure, passing
from gradaccum_jax.window.state import (
    UNKNOWN,
    AccumulationState,
    all_like,
    as_read,
    as_stored,
    fields_of,
    like,
)

Firsts = tuple[Scalar, ...]
"""The first micro-batches' weight, mean squared norm by weight, and number of devices
that had one. Empty where noise is not measured.
"""


def fresh(options: Options, dtype: DType) -> dict[str, Tree]:
    """Return the fields before the first micro-batch, by name."""
    noise = (
        None
        if options.noise_decay is None
        else Noise(*(jnp.zeros((), dtype) for _ in Noise._fields))
    )
    return {
        "loss": jnp.zeros((), dtype),
        "last_loss": jnp.full((), UNKNOWN, dtype),
        "noise": noise,
    }


def add(
    state: AccumulationState,
    loss: Scalar,
    weight: Scalar,
    adds: Scalar,
    options: Options,
    shard_axes: ShardAxes,
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
    state = state._replace(loss=like(total, state.loss))
    if state.noise is None:
        return state
    fields, held = fields_of(state), lax.stop_gradient(state.accumulator)

    def look(_: Scalar) -> Scalar:
        return measure(held, one, state.weight, shard_axes)[0]

    first = kit.is_first(state.noise, fields)
    one = first.astype(state.weight.dtype)
    norm = once(first, look, jnp.zeros_like(state.loss))
    state = state._replace(
        noise=Noise(
            *all_like(kit.first_seen(state.noise, fields, norm, jnp.where), state.noise)
        )
    )
    # Never below 0. The dependence tells XLA that the norm is taken before the window's
    # end writes over the sum: else it copies the sum.
    return state._replace(
        weight=like(jnp.where(norm < 0, norm, state.weight), state.weight)
    )


def firsts_of(state: AccumulationState) -> Firsts:
    return () if state.noise is None else (state.noise[0], state.noise[1], 1)


def addends(state: AccumulationState) -> Firsts:
    """Return the numbers that devices add up for a shared window:
    `gradaccum.kit.noise_shares`.
    """
    return () if state.noise is None else kit.noise_shares(state.noise, jnp.where)


def averaged(added: Firsts, state: AccumulationState) -> Firsts:
    """Return the first micro-batches of all devices, from the sums of their
    `addends`.
    """
    if state.noise is None:
        return ()
    weights, squares, count = added
    return (*kit.joined_noise(state.noise, weights, squares, jnp.where)[:2], count)


def close(
    state: AccumulationState,
    loss: Scalar,
    firsts: Firsts,
    grad_norm: Scalar,
    fields: Fields,
    options: Options,
) -> AccumulationState:
    """Return the state after a window of this `loss`, with these `firsts`, that was
    decided on by `fields`.
    """
    held, last = all_like(
        (jnp.zeros_like(state.loss), as_stored(loss)), (state.loss, state.last_loss)
    )
    ended = state._replace(loss=held, last_loss=last)
    if state.noise is None:
        return ended
    weight, square, count = firsts
    seen = kit.window_seen(
        (weight, square, *state.noise[2:]), fields, grad_norm, options, jnp.where, count
    )
    return ended._replace(noise=Noise(*all_like(seen, state.noise)))


def discard(state: AccumulationState) -> AccumulationState:
    emptied = state._replace(loss=jnp.zeros_like(state.loss))
    return (
        emptied
        if state.noise is None
        else emptied._replace(
            noise=Noise(*all_like(kit.forget_window(state.noise), state.noise))
        )
    )
