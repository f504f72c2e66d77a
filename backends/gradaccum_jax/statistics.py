"""The statistics of a window: the loss of its micro-batches, and the gradient noise.

All of it is a few scalars of the state. Losses have the derivative that gradients have, at weight 0 too. A loss that nobody told is NaN,
which the state stores in its own way (see `state.UNKNOWN`). The noise scale needs one norm more per window, that of the sum after its first
micro-batch: a conditional, which no other micro-batch enters. It is no part of any derivative.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax

from gradaccum import kit
from gradaccum.kit import Fields, Noise, Options, Scalar
from gradaccum_jax.arrays import DType, Tree
from gradaccum_jax.control_flow import once
from gradaccum_jax.sharding import ShardAxes
from gradaccum_jax.state import UNKNOWN, AccumulationState, as_read, as_stored, fields_of, like
from gradaccum_jax.sums import measure, passing

Firsts = tuple[Scalar, ...]
"""The first micro-batches of a window: their weight, the mean of their squared norms by weight, and how many devices had one. Empty where
noise is not measured."""


def fresh(options: Options, dtype: DType) -> dict[str, Tree]:
    """The fields before the first micro-batch, by name. Every scalar has an array of its own: no buffer may be donated twice."""
    noise = None if options.noise_decay is None else Noise(*(jnp.zeros((), dtype) for _ in Noise._fields))
    return {"loss": jnp.zeros((), dtype), "last_loss": jnp.full((), UNKNOWN, dtype), "noise": noise}


def add(state: AccumulationState, loss: Scalar, weight: Scalar, adds: Scalar, options: Options, shard_axes: ShardAxes) -> AccumulationState:
    if loss is None:
        total = jnp.where(adds, UNKNOWN, state.loss)
    else:
        total = as_stored(kit.add_loss(as_read(state.loss), loss, weight, adds, options, passing(adds | (weight == 0))))
    state = state._replace(loss=like(total, state.loss))
    if state.noise is None:
        return state
    fields, held = fields_of(state), lax.stop_gradient(state.accumulator)

    def look(_: Scalar) -> Scalar:
        return measure(held, state.loss.dtype, shard_axes)[0]

    norm = once(kit.is_first(state.noise, fields), look, jnp.zeros_like(state.loss))
    state = _with_noise(state, Noise(*kit.first_seen(state.noise, fields, norm, jnp.where)))
    # Never below 0. The dependence tells XLA that the norm is taken before the window's end writes over the sum: else it copies the sum.
    return state._replace(weight=like(jnp.where(norm < 0, norm, state.weight), state.weight))


def firsts_of(state: AccumulationState) -> Firsts:
    return () if state.noise is None else (state.noise[0], state.noise[1], 1)


def addends(state: AccumulationState) -> Firsts:
    """What devices add up for the window that they share: `gradaccum.kit.noise_shares`."""
    return () if state.noise is None else kit.noise_shares(state.noise, jnp.where)


def averaged(added: Firsts, state: AccumulationState) -> Firsts:
    """The first micro-batches of all devices, from the sums of their `addends`; `state` is one device's."""
    if state.noise is None:
        return ()
    weights, squares, count = added
    return (*kit.joined_noise(state.noise, weights, squares, jnp.where)[:2], count)


def close(
    state: AccumulationState, loss: Scalar, firsts: Firsts, grad_norm: Scalar, fields: Fields, options: Options, at_end: Scalar
) -> AccumulationState:
    """The state after a window where `at_end` holds, else as it is.

    Args:
        state: the state with the window's last micro-batch.
        loss: the window's, from `loss_of`.
        firsts: those of all devices that share the window.
        grad_norm: `gradaccum.kit.Decision.grad_norm`.
        fields: those that were decided on.
        options: the optimizer's.
        at_end: bool scalar.
    """
    last = like(jnp.where(at_end, as_stored(loss), state.last_loss), state.last_loss)
    ended = state._replace(loss=like(jnp.where(at_end, 0, state.loss), state.loss), last_loss=last)
    if state.noise is None:
        return ended
    weight, square, count = firsts
    seen = kit.window_seen((weight, square, *state.noise[2:]), fields, grad_norm, options, jnp.where, count)
    return _with_noise(ended, Noise(*(jnp.where(at_end, new, old) for new, old in zip(seen, state.noise, strict=True))))


def loss_of(total: Scalar, fields: Fields, options: Options) -> Scalar:
    """The loss of the window that ends, from the sum of all of its micro-batches: see `gradaccum.kit.window_loss`."""
    return kit.window_loss(total, fields, options, jnp.where)


def discard(state: AccumulationState) -> AccumulationState:
    """The state with the open window's statistics forgotten."""
    emptied = state._replace(loss=jnp.zeros_like(state.loss))
    return emptied if state.noise is None else _with_noise(emptied, Noise(*kit.forget_window(state.noise)))


def _with_noise(state: AccumulationState, noise: Noise) -> AccumulationState:
    held = noise if state.noise is None else state.noise
    return state._replace(noise=Noise(*(like(new, old) for new, old in zip(noise, held, strict=True))))
