"""The open window: take in a micro-batch, close the window where it ends, forget it.

These are pure functions of the state. Only the device knows whether a window ends, so every micro-batch runs one program: `add`, then
`close`, which changes the state only where `at_end` holds.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from gradaccum.kit import Decision, Fields, Options, Scalar, accumulate, contribution, decide, divisor, joined, usable
from gradaccum.kit import close as close_fields
from gradaccum.kit import discard as discard_fields
from gradaccum_jax import sums, unreduced
from gradaccum_jax.agreement import agree, require_equal_parts, require_no_reduction
from gradaccum_jax.control_flow import once
from gradaccum_jax.norm import measure
from gradaccum_jax.state import AccumulationState, current_terms, fields_of, with_event, with_fields
from gradaccum_jax.types import Gradients, Tree, Updates
from gradaccum_jax.update import Traced, Update
from gradaccum_jax.varying import axes_of, vary
from gradaccum_jax.workers.reduction import Window, all_reduce
from gradaccum_jax.workers.shard_axes import ShardAxes, everywhere, require_told

Look = Callable[[Fields, Tree], tuple[Scalar, Scalar]]
"""The norm of a window's sum, and whether all of it is finite and fits the gradient's dtype."""
Held = tuple[Tree, Scalar, Scalar, Scalar, Scalar]
"""A sum, the weight and the overflow flag that go with it, and what `Look` says."""


def add(
    state: AccumulationState, gradients: Gradients, weight: Scalar, steps: Scalar, options: Options, shard_axes: ShardAxes = None
) -> tuple[AccumulationState, Scalar]:
    """Take in a micro-batch: add its gradient to the sum, and count it.

    Args:
        state: the state before the micro-batch.
        gradients: aligned with the accumulator's leaves; None adds nothing.
        weight: the micro-batch's weight, a scalar array; None: 1.
        steps: the size of the window; None: the caller closes it.
        options: the optimizer's.
        shard_axes: the mesh axes along which gradients are sharded.

    Returns:
        The state with the micro-batch in it, and a bool scalar: it was dropped.
    """
    given, one, fields = weight is not None, jnp.ones_like(state.weight), fields_of(state)
    factor = contribution(weight, options) if given and options.reduction == "mean" else None
    weight = weight if given else one
    dropping = options.on_overflow == "drop_micro_batch"
    finite = everywhere(sums.all_finite(gradients), shard_axes) if dropping else jnp.asarray(True)
    finite = finite & (steps >= 1) if callable(options.steps) else finite
    # Only the running program knows this, as it looks at the total. XLA:CPU vectorises select(add), but compiles a bare in-place add to a
    # scalar loop.
    adds = usable(fields, weight, finite)
    harmless = adds | (weight == 0)
    total = sums.add(state.accumulator, gradients, factor, adds, harmless)
    counted = with_fields(state, accumulate(fields, weight, finite, jnp.where))
    terms = vary(current_terms(options, steps), axes_of(state.terms))
    return counted._replace(accumulator=total, terms=terms), ~harmless if dropping else False


def close(
    state: AccumulationState, update: Update, options: Options, *, at_end: Scalar, dropped: Scalar = False, weight: Scalar = None
) -> tuple[Updates, AccumulationState]:
    """Close the window where it ends: make its update or skip it, count that, clear the sum.

    Args:
        state: the state with the last micro-batch in it.
        update: the inner optimizer's call.
        options: the optimizer's.
        at_end: bool scalar: the window ends here.
        dropped: bool scalar: the last micro-batch was dropped.
        weight: the last micro-batch's; None if the caller gave none.

    Returns:
        The updates (zeros if none was made) and the state.
    """
    parts = state.accumulator
    state = state._replace(accumulator=unreduced.total(parts, at_end))
    decision, fields, total = _decide(state, update, options, at_end)
    traced, held = _traced(state, update, options, decision.divisor, weight), (state.inner_state, state.masters)
    apply, overflow = agree(at_end & decision.apply, decision.overflow, at_end, traced.axes, update.control_flow)
    updates, total, held = update.run(total, held, decision.divisor, traced.updates, apply=apply, at_end=at_end)
    fields = _where(at_end, close_fields(fields, apply, overflow, options, jnp.where), fields_of(state))
    total = unreduced.cleared(parts, total, at_end)
    norm = jnp.asarray(jnp.where(at_end, decision.grad_norm, state.last_grad_norm), jnp.result_type(state.last_grad_norm))
    ended = with_fields(state, fields)._replace(accumulator=total, inner_state=held[0], masters=held[1], last_grad_norm=norm)
    return updates, with_event(ended, apply, at_end & ~apply, jnp.where(at_end, overflow, dropped))


def keep(
    state: AccumulationState, update: Update, options: Options, *, never: Scalar, dropped: Scalar, weight: Scalar
) -> tuple[Updates, AccumulationState]:
    """In place of `close` in a window that only the caller closes: zeros, and the sum as it is.

    Args:
        state: as for `close`.
        update: the inner optimizer's call.
        options: the optimizer's.
        never: bool scalar: `gradaccum.kit.ends` of such a window.
        dropped: as for `close`.
        weight: as for `close`.
    """
    parts = state.accumulator
    state = state._replace(accumulator=jax.tree.map(unreduced.empty_total, parts))
    traced = _traced(state, update, options, jnp.ones_like(state.weight), weight)
    updates, total = update.keep(state.accumulator, traced.updates, never)
    total = unreduced.cleared(parts, total, never)
    return updates, with_event(state._replace(accumulator=total), False, False, dropped)


def discard(state: AccumulationState) -> AccumulationState:
    """Forget the window: no update, nothing counted, the loss scale untouched."""
    emptied = with_fields(state, discard_fields(fields_of(state)))
    return with_event(emptied._replace(accumulator=sums.clear(state.accumulator)), False, False, False)


def _decide(state: AccumulationState, update: Update, options: Options, at_end: Scalar) -> tuple[Decision, Fields, Tree]:
    """Decide on the window: the decision, and the fields and the sum that it is about. Where the window goes on, nothing is measured."""
    start = (jnp.zeros_like(state.weight), jnp.asarray(True))
    largest = float(jnp.finfo(start[0].dtype).max)

    def look(fields: Fields, accumulator: Tree) -> tuple[Scalar, Scalar]:
        norm, finite = measure(accumulator, start[0].dtype, update.control_flow, update.shard_axes)
        fitting = sums.fits(accumulator, divisor(fields, options, jnp.where), update.dtypes.like)
        return norm, finite & everywhere(fitting, update.shard_axes)

    fields, total = fields_of(state), state.accumulator
    if update.axes:
        fields, total, norm, finite = _join(state, look, update, at_end)
    else:
        norm, finite = once(at_end, lambda _: look(fields, total), start, update.control_flow)
    return Decision(*decide(fields, norm, finite, options, jnp.where, largest)), fields, total


def _join(state: AccumulationState, look: Look, update: Update, at_end: Scalar) -> tuple[Fields, Tree, Scalar, Scalar]:
    """Where the window ends, the fields and the sum of all devices, and what `look` says of these. Elsewhere this device's own sum.

    Everything but the sum starts with numbers that are the same on all devices, so that its type says so at the end too.
    """
    fields, nothing = fields_of(state), jnp.zeros((), jnp.result_type(state.weight))

    def add_up(held: Held) -> Held:
        whole = all_reduce(Window(held[0], state.weight, state.overflow), update.axes)
        return whole.accumulator, whole.weight, whole.overflow, *look(joined(fields, whole.weight, whole.overflow), whole.accumulator)

    start = (state.accumulator, nothing, jnp.asarray(False), nothing, jnp.asarray(True))
    total, weight, overflow, norm, finite = once(at_end, add_up, start, update.control_flow)
    return joined(fields, weight, overflow), total, norm, finite


def _traced(state: AccumulationState, update: Update, options: Options, divisor: Scalar, weight: Scalar) -> Traced:
    traced = update.traced(state.accumulator, (state.inner_state, state.masters), divisor)
    require_no_reduction(traced.axes, update.axes)
    require_equal_parts(options, traced.axes, weight)
    require_told(state.accumulator, traced.axes | frozenset(update.axes), update.shard_axes, options)
    return traced


def _where(condition: Scalar, a: Fields, b: Fields) -> Fields:
    return tuple(jnp.where(condition, new, old) for new, old in zip(a, b, strict=True))
