"""Add a micro-batch to the open window, close the window, or discard it.

Whether a micro-batch ends the window is known only on the device. So every micro-batch
runs the same compiled program: first `add`, then `close`, which closes the window only
if `at_end` is true.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gradaccum import kit
from gradaccum.kit import (
    Decision,
    Fields,
    Options,
    Scalar,
    accumulate,
    contribution,
    decide,
    divisor,
    joined,
    measures,
    usable,
)
from gradaccum.kit import close as close_fields
from gradaccum.kit import discard as discard_fields
from gradaccum_jax import gradient_sum
from gradaccum_jax.arrays import Gradients, Tree, Updates
from gradaccum_jax.extensions import add_loss, close_loss, discard_loss
from gradaccum_jax.gradient_sum import measure
from gradaccum_jax.sharding import ShardAxes, everywhere
from gradaccum_jax.state import (
    AccumulationState,
    as_read,
    as_stored,
    current_terms,
    fields_of,
    like,
    with_event,
    with_fields,
)
from gradaccum_jax.update import Update
from gradaccum_jax.workers.group import ReducedWindow, all_reduce, require_known_axes
from gradaccum_jax.xla import in_one_kernel, run_if

Event = tuple[Scalar, Scalar, Scalar]
"""The outcome of a call as three bool scalars (applied, skipped, overflow). The state
stores them as `last_applied`, `last_skipped` and `last_overflow`.
"""


class MicroBatch(NamedTuple):
    """A micro-batch's gradients, weight and loss."""

    gradients: Gradients
    """The micro-batch's gradients, in the order of the accumulator's leaves. None means
    that nothing is added to the corresponding leaf.
    """
    weight: Scalar = None
    """The micro-batch's weight, a scalar array; None means 1."""
    loss: Scalar = None
    """The micro-batch's unscaled loss, a scalar array; None if the caller passed no
    loss.
    """


def add(
    state: AccumulationState,
    micro_batch: MicroBatch,
    steps: Scalar,
    options: Options,
    shard_axes: ShardAxes = None,
) -> tuple[AccumulationState, Scalar]:
    """Add a micro-batch to the open window. Return the new state, and a bool scalar
    that is true if the micro-batch was dropped.
    """
    gradients = micro_batch.gradients
    weight = micro_batch.weight
    fields = fields_of(state)
    factor = None
    if weight is None:
        weight = jnp.ones_like(state.weight)
    elif options.reduction == "mean":
        factor = contribution(weight, options)
    can_drop = options.on_overflow == "drop_micro_batch"
    finite = jnp.asarray(True)
    if can_drop:
        finite = everywhere(gradient_sum.all_finite(gradients, factor), shard_axes)
    if not kit.is_known(options.steps):
        finite = finite & (number_of(steps) >= 1)
    # `adds` is never a constant of the program, because `usable` reads the window's
    # total weight. With a constant, XLA would remove the select in `gradient_sum.add`,
    # and XLA:CPU would compile the in-place addition to a scalar loop instead of
    # vectorizing it (JAX 0.7).
    adds = usable(fields, weight, finite)
    # Between two windows the accumulator contains leftover values from the last window,
    # so the first micro-batch of a window is added to zeros instead.
    total = gradient_sum.emptied(state.accumulator, fields[0] == 0)
    total = gradient_sum.add(total, gradients, factor, adds)
    state = with_fields(state, accumulate(fields, weight, finite, jnp.where))
    terms = like(current_terms(options, steps), state.terms)
    state = state._replace(accumulator=total, terms=terms)
    state = add_loss(state, micro_batch.loss, weight, adds, options)
    return state, ~adds & (weight != 0) if can_drop else False


class Ending(NamedTuple):
    """The results of closing a window, except for the updates."""

    state: AccumulationState
    """The state after the window. Its fields `accumulator`, `inner_state`, `masters`
    and `terms` are None.
    """
    total: Tree
    """The sum of the gradients of all devices that share the window; None if the window
    is not shared.
    """
    apply: Scalar
    divisor: Scalar
    loss: Scalar


def close(
    state: AccumulationState,
    update: Update,
    options: Options,
    *,
    at_end: Scalar,
    event: Event,
    takes_loss: bool,
    denominator: Scalar = None,
) -> tuple[Updates, AccumulationState]:
    """Close the window if `at_end` is true: apply or skip its update, and count the
    window. Otherwise, return all-zero updates and a state in which `event` is the
    outcome of the call.

    The program has three conditionals: the first decides whether to apply the update,
    the second divides the gradient sum in place, and the third runs the inner
    optimizer.

    The division has its own conditional, because it would need more memory in the
    branch that runs the optimizer. XLA:CPU runs the operations of a branch breadth
    first, so it would divide the sums of all parameters before it uses any quotient.
    AdamW reads each quotient twice, so all quotients would be in memory at once. (JAX
    0.7.1 would need temporary memory of 1.0 times the size of the parameters instead of
    0.25 times.) The optimizer's branch divides the sum only if all arrays are small, or
    if the quotient has a wider dtype than the sum and so cannot overwrite the sum.

    If all arrays are small, compile time matters more than memory. In this case there
    is no conditional for the division, and one kernel computes all scalars that the
    first conditional needs. With large arrays, this kernel would cost 30 us in each
    micro-batch (JAX 0.7.1).
    """
    require_known_axes(state.accumulator, update.params, update.axes, update.shard_axes)
    is_small = gradient_sum.is_small(state.accumulator)
    if is_small:
        counts = (at_end, state.micro_step, state.weight, state.overflow, state.loss)
        at_end, micro_step, weight, overflow, loss = in_one_kernel(counts)
        state = state._replace(
            micro_step=micro_step, weight=weight, overflow=overflow, loss=loss
        )
    bare_state = with_event(
        state._replace(accumulator=None, inner_state=None, masters=None, terms=None),
        *event,
    )
    is_shared = bool(update.axes)

    def end(ending: Ending) -> Ending:
        total = ending.total if is_shared else state.accumulator
        fields = fields_of(state)
        loss = as_read(state.loss)
        if is_shared:
            window = ReducedWindow(total, state.weight, state.overflow, loss)
            total, weight, overflow, loss = all_reduce(window, update.axes)
            fields = joined(fields, weight, overflow)
        divides = options
        if denominator is not None:
            fields, divides = kit.with_denominator(
                fields, denominator, options, jnp.where
            )
        decision = decide_on(fields, total, update, divides)
        loss = kit.window_loss(loss, fields, divides, jnp.where)
        fields = close_fields(
            fields, decision.apply, decision.overflow, options, jnp.where
        )
        closed_state = close_loss(with_fields(ending.state, fields), loss)
        norm = like(as_stored(decision.grad_norm), state.last_grad_norm)
        closed_state = with_event(
            closed_state._replace(last_grad_norm=norm),
            decision.apply,
            ~decision.apply,
            decision.overflow,
        )
        total = total if is_shared else None
        numbers = (closed_state, decision.apply, decision.divisor, loss)
        closed_state, apply, divisor, loss = in_one_kernel(numbers)
        return Ending(closed_state, total, apply, divisor, loss)

    start_total = state.accumulator if is_shared else None
    unused = jnp.ones_like(state.weight)
    start = Ending(bare_state, start_total, jnp.asarray(False), unused, unused)
    ending = run_if(at_end, end, start)
    total = ending.total if is_shared else state.accumulator
    divisor: Scalar = ending.divisor
    if not is_small and gradient_sum.keeps_dtypes(total, divisor):
        divide = partial(gradient_sum.divide, divisor=divisor)
        total = run_if(ending.apply, divide, total)
        divisor = None
    if takes_loss:
        # In optax's optimizers, the argument with the loss is called ``value``.
        update = update._replace(extra={**update.extra, "value": ending.loss})
    inner_state = (state.inner_state, state.masters)
    updates, total, (inner_state, masters) = update.run(
        total, inner_state, divisor, ending.apply
    )
    if is_shared:
        # Clear the sum with a select, which XLA computes in place. Without this select
        # XLA would copy the sum, because `data_parallel` adds a leading axis to it.
        total = gradient_sum.emptied(total, at_end)
    return updates, ending.state._replace(
        accumulator=total, inner_state=inner_state, masters=masters, terms=state.terms
    )


def discard(state: AccumulationState) -> AccumulationState:
    state = with_fields(state, discard_fields(fields_of(state)))
    state = discard_loss(state)
    state = state._replace(accumulator=gradient_sum.clear(state.accumulator))
    return with_event(state, False, False, False)


# The norm of a window's gradient can determine whether the update is applied.
#
# With ``on_overflow="ignore"``, the norm is computed only if another option needs it.


def decide_on(
    fields: Fields, total: Tree, update: Update, divides: Options
) -> Decision:
    """Return the `Decision` about the end of a window: for example, whether the update
    is applied, and by what number the gradient sum `total` is divided.

    `divides` contains the options of `gradaccum.wrap`. If the caller passed a
    denominator, `kit.with_denominator` has changed `fields` and `divides` so that the
    sum is divided by this denominator.
    """
    dtype = jnp.result_type(fields[3])
    norm = jnp.full((), jnp.nan, dtype)
    finite = jnp.asarray(True)
    if measures(divides):
        norm = measure(total, dtype, update.shard_axes)
        fits = gradient_sum.fits(
            total, divisor(fields, divides, jnp.where), update.types.update_dtypes
        )
        finite = (norm < jnp.inf) & everywhere(fits, update.shard_axes)
    largest = float(jnp.finfo(dtype).max)
    return Decision(*decide(fields, norm, finite, divides, jnp.where, largest))


# If ``steps`` is a callable, it determines the size of each window.
#
# A concrete size is checked as in every backend, but the value of a traced size is
# unknown. If a traced size turns out to be below 1, every micro-batch is treated as if
# its gradient were not finite. No update is then applied, and `result` reports this.


def number_of(size: Scalar) -> Scalar:
    return size.weight if isinstance(size, kit.UntilWeight) else size


def check_known(schedule: kit.Schedule, optimizer_step: Scalar = 0) -> None:
    """Check the size that a callable ``steps`` returns for the window that begins after
    `optimizer_step` updates. By default, this is the first window. Nothing is checked
    under `jax.jit`, where the size is unknown. In a loop outside `jax.jit`, the check
    waits until the previous update has been computed.
    """
    if kit.is_known(schedule) or isinstance(optimizer_step, jax.core.Tracer):
        return
    step = np.asarray(optimizer_step, np.int32)
    with jax.ensure_compile_time_eval():
        size = kit.steps_at(schedule, step, jnp.where)
    if not isinstance(number_of(size), jax.core.Tracer):
        kit.require_steps(size, int(step), schedule)
