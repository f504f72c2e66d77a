"""The end of a window: the norm of its sum, and the decision on it.

With ``on_overflow="ignore"`` and no option that asks for the norm, nothing is measured: the decision is made of scalars alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp

from gradaccum.kit import Decision, Fields, Options, Scalar, decide, divisor, joined, measures
from gradaccum_jax import knowledge, sums
from gradaccum_jax.control_flow import once
from gradaccum_jax.knowledge import Firsts
from gradaccum_jax.norm import measure
from gradaccum_jax.state import AccumulationState, fields_of
from gradaccum_jax.types import Tree
from gradaccum_jax.untold import meant
from gradaccum_jax.update import Update
from gradaccum_jax.varying import everywhere
from gradaccum_jax.workers.reduction import Window, all_reduce

Look = Callable[[Fields, Tree], tuple[Scalar, Scalar]]
"""The norm of a window's sum, and whether all of it is finite and fits the gradient's dtype."""
Held = tuple[Window, Scalar, Scalar]
"""A window, and what `Look` says of it."""


class Whole(NamedTuple):
    """The window that is decided on: that of all devices that share it."""

    fields: Fields
    total: Tree
    """Its sum."""
    loss: Scalar
    """The sum of its losses."""
    firsts: Firsts
    """What is known of its first micro-batches."""


def decide_on(state: AccumulationState, update: Update, options: Options, at_end: Scalar) -> tuple[Decision, Whole]:
    """Decide on the window: the decision, and what it is about. Where the window goes on, nothing is measured."""
    dtype, measuring = jnp.result_type(state.weight), measures(options)
    start = (jnp.full((), 0 if measuring else jnp.nan, dtype), jnp.asarray(True))

    def look(fields: Fields, accumulator: Tree) -> tuple[Scalar, Scalar]:
        norm, finite = measure(accumulator, dtype, update.shard_axes)
        fitting = sums.fits(accumulator, divisor(fields, options, jnp.where), update.dtypes.like)
        return norm, finite & everywhere(fitting, update.shard_axes)

    if update.axes:
        whole, norm, finite = _join(state, look if measuring else lambda *_: start, update, at_end)
    else:
        whole = Whole(fields_of(state), state.accumulator, meant(state.loss), knowledge.firsts_of(state))
        norm, finite = once(at_end, lambda _: look(whole.fields, whole.total), start) if measuring else start
    decision = Decision(*decide(whole.fields, norm, finite, options, jnp.where, float(jnp.finfo(dtype).max)))
    if measuring and options.on_overflow == "ignore":
        # Never below 0. Nothing else tells XLA to measure the sum before the optimizer's updates take its place: see `knowledge.add`.
        decision = decision._replace(divisor=jnp.where(norm < 0, norm, decision.divisor))
    return decision, whole


def _join(state: AccumulationState, look: Look, update: Update, at_end: Scalar) -> tuple[Whole, Scalar, Scalar]:
    """Where the window ends, what all devices have, and what `look` says of it. Elsewhere this device's own sum.

    Everything but the sum starts with numbers that are the same on all devices, so that its type says so at the end too.
    """
    fields, nothing = fields_of(state), jnp.zeros((), jnp.result_type(state.weight))
    own = Window(state.accumulator, state.weight, state.overflow, meant(state.loss), knowledge.addends(state))

    def add_up(held: Held) -> Held:
        whole = all_reduce(own._replace(accumulator=held[0].accumulator), update.axes)
        return whole, *look(joined(fields, whole.weight, whole.overflow), whole.accumulator)

    empty = Window(state.accumulator, nothing, jnp.asarray(False), nothing, tuple(nothing for _ in own.firsts))
    window, norm, finite = once(at_end, add_up, (empty, nothing, jnp.asarray(True)))
    fields = joined(fields, window.weight, window.overflow)
    return Whole(fields, window.accumulator, window.loss, knowledge.averaged(window.firsts, state)), norm, finite
