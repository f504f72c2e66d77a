"""The open window: take in a micro-batch, close the window where it ends, forget it.

These are pure functions of the state. Only the device knows whether a window ends, so every micro-batch runs one program: `add`, then
`close`, which changes the state only where `at_end` holds.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from gradaccum.kit import (
    Fields,
    Options,
    Scalar,
    accumulate,
    contribution,
    is_known,
    measures,
    usable,
)
from gradaccum.kit import close as close_fields
from gradaccum.kit import discard as discard_fields
from gradaccum_jax import knowledge, sums, unreduced
from gradaccum_jax.agreement import agree, require_equal_parts, require_no_reduction
from gradaccum_jax.deciding import decide_on
from gradaccum_jax.sizes import number_of
from gradaccum_jax.state import AccumulationState, current_terms, fields_of, with_event, with_fields
from gradaccum_jax.types import Gradients, Updates
from gradaccum_jax.untold import kept
from gradaccum_jax.update import Traced, Update
from gradaccum_jax.varying import ShardAxes, axes_of, everywhere, vary
from gradaccum_jax.workers.shard_axes import require_told


class MicroBatch(NamedTuple):
    """What a micro-batch brings."""

    gradients: Gradients
    """Aligned with the accumulator's leaves; None adds nothing."""
    weight: Scalar = None
    """A scalar array; None: 1."""
    loss: Scalar = None
    """A scalar array, unscaled; None if it was not told."""


def add(
    state: AccumulationState,
    micro_batch: MicroBatch,
    steps: Scalar,
    options: Options,
    shard_axes: ShardAxes = None,
) -> tuple[AccumulationState, Scalar]:
    """Take in a micro-batch: add its gradient to the sum, and count it.

    Args:
        state: the state before the micro-batch.
        micro_batch: what is taken in.
        steps: the size of the window; None: the caller closes it.
        options: the optimizer's.
        shard_axes: the mesh axes along which gradients are sharded.

    Returns:
        The state with the micro-batch in it, and a bool scalar: it was dropped.
    """
    gradients, weight, loss = micro_batch
    given, one, fields = weight is not None, jnp.ones_like(state.weight), fields_of(state)
    factor = contribution(weight, options) if given and options.reduction == "mean" else None
    weight = weight if given else one
    dropping = options.on_overflow == "drop_micro_batch"
    finite = everywhere(sums.all_finite(gradients), shard_axes) if dropping else jnp.asarray(True)
    finite = finite if is_known(options.steps) else finite & (number_of(steps) >= 1)
    # Only the running program knows this, as it looks at the total. XLA:CPU vectorises select(add), but compiles a bare in-place add to a
    # scalar loop.
    adds = usable(fields, weight, finite)
    harmless = adds | (weight == 0)
    held = sums.emptied(state.accumulator, fields[0] == 0)  # of what the last window left there
    total = sums.add(held, gradients, factor, adds, harmless)
    counted = with_fields(state, accumulate(fields, weight, finite, jnp.where))
    terms = vary(current_terms(options, steps), axes_of(state.terms))
    counted = counted._replace(accumulator=total, terms=terms)
    return knowledge.add(counted, loss, weight, adds, options, shard_axes), ~harmless if dropping else False


def close(
    state: AccumulationState,
    update: Update,
    options: Options,
    *,
    at_end: Scalar,
    dropped: Scalar = False,
    weight: Scalar = None,
    tells: bool = True,
) -> tuple[Updates, AccumulationState]:
    """Close the window where it ends: make its update or skip it, and count that.

    Args:
        state: the state with the last micro-batch in it.
        update: the inner optimizer's call.
        options: the optimizer's.
        at_end: bool scalar: the window ends here.
        dropped: bool scalar: the last micro-batch was dropped.
        weight: the last micro-batch's; None if the caller gave none.
        tells: the inner optimizer gets the window's loss as ``value``.

    Returns:
        The updates (zeros if none was made) and the state.
    """
    parts = state.accumulator
    state = state._replace(accumulator=unreduced.total(parts, at_end))
    decision, whole = decide_on(state, update, options, at_end)
    loss = knowledge.loss_of(whole.loss, whole.fields, options)
    update = update.told(loss) if tells else update
    traced, held = _traced(state, update, options, decision.divisor, weight), (state.inner_state, state.masters)
    axes = traced.axes if measures(options) else frozenset()  # without a measurement, all devices decide alike
    apply, overflow = agree(at_end & decision.apply, decision.overflow, at_end, axes)
    updates, total, held = update.run(whole.total, held, decision.divisor, traced, apply)
    fields = _where(at_end, close_fields(whole.fields, apply, overflow, options, jnp.where), fields_of(state))
    # On its way out of `data_parallel` a device's sum gets a leading axis, for which XLA would copy it; a select is written in place.
    total = sums.emptied(total, at_end) if update.axes else total
    total = unreduced.cleared(parts, total, at_end)
    norm = jnp.asarray(jnp.where(at_end, kept(decision.grad_norm), state.last_grad_norm), jnp.result_type(state.last_grad_norm))
    state = knowledge.close(state, loss, whole.firsts, decision.grad_norm, whole.fields, options, at_end)
    ended = with_fields(state, fields)._replace(accumulator=total, inner_state=held[0], masters=held[1], last_grad_norm=norm)
    return updates, with_event(ended, apply, at_end & ~apply, jnp.where(at_end, overflow, dropped))


def keep(
    state: AccumulationState, update: Update, options: Options, *, never: Scalar, dropped: Scalar, weight: Scalar, tells: bool
) -> tuple[Updates, AccumulationState]:
    """In place of `close` in a window that only the caller closes: zeros, and the sum as it is.

    Args:
        state: as for `close`.
        update: the inner optimizer's call.
        options: the optimizer's.
        never: bool scalar: `gradaccum.kit.ends` of such a window.
        dropped: as for `close`.
        weight: as for `close`.
        tells: as for `close`.
    """
    never = never if state.noise is None else never & (state.weight >= 0)  # always so, but see `knowledge.add`
    update = update.told(jnp.zeros_like(state.loss)) if tells else update
    parts = state.accumulator
    state = state._replace(accumulator=jax.tree.map(unreduced.empty_total, parts))
    traced = _traced(state, update, options, jnp.ones_like(state.weight), weight)
    updates, total = update.keep(state.accumulator, traced.updates, never)
    total = unreduced.cleared(parts, total, never)
    return updates, with_event(state._replace(accumulator=total), False, False, dropped)


def discard(state: AccumulationState) -> AccumulationState:
    """Forget the window: no update, nothing counted, the loss scale untouched."""
    emptied = knowledge.discard(with_fields(state, discard_fields(fields_of(state))))
    return with_event(emptied._replace(accumulator=sums.clear(state.accumulator)), False, False, False)


def _traced(state: AccumulationState, update: Update, options: Options, divisor: Scalar, weight: Scalar) -> Traced:
    traced = update.traced(state.accumulator, (state.inner_state, state.masters), divisor)
    require_no_reduction(traced.axes, update.axes)
    require_equal_parts(options, traced.axes, weight)
    require_told(state.accumulator, traced.axes | frozenset(update.axes), update.shard_axes, options)
    return traced


def _where(condition: Scalar, a: Fields, b: Fields) -> Fields:
    return tuple(jnp.where(condition, new, old) for new, old in zip(a, b, strict=True))
