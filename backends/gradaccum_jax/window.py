"""The open window: take in a micro-batch, close the window where it ends, forget it.

Only the device knows whether a window ends, so every micro-batch runs one program:
`add`, then `close`, which changes the state only if `at_end` holds.
"""

from __future__ import annotations

from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np

from gradaccum import ArgumentTypeError, kit
from gradaccum.kit import (
    Decision,
    Fields,
    Options,
    Scalar,
    accumulate,
    contribution,
    decide,
    divisor,
    explain,
    joined,
    measures,
    usable,
)
from gradaccum.kit import close as close_fields
from gradaccum.kit import discard as discard_fields
from gradaccum_jax import extensions, gradient_sum
from gradaccum_jax.arrays import Gradients, Tree, Updates
from gradaccum_jax.gradient_sum import measure, together
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
from gradaccum_jax.workers.group import Window, all_reduce, require_told
from gradaccum_jax.xla import once

Event = tuple[Scalar, Scalar, Scalar]
"""The last event as a state has it: applied, skipped, overflow."""


class MicroBatch(NamedTuple):
    """A micro-batch's gradients, weight and loss."""

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
    """Add a micro-batch to the window; return the state, and a bool scalar: the
    micro-batch was dropped.
    """
    gradients, weight, loss = micro_batch
    given, one, fields = (
        weight is not None,
        jnp.ones_like(state.weight),
        fields_of(state),
    )
    factor = (
        contribution(weight, options) if given and options.reduction == "mean" else None
    )
    weight = weight if given else one
    dropping = options.on_overflow == "drop_micro_batch"
    finite = (
        everywhere(gradient_sum.all_finite(gradients), shard_axes)
        if dropping
        else jnp.asarray(True)
    )
    finite = finite if kit.is_known(options.steps) else finite & (number_of(steps) >= 1)
    # Only the running program knows this, as it looks at the total. XLA:CPU vectorises
    # select(add), but compiles a bare in-place add to a scalar loop.
    adds = usable(fields, weight, finite)
    harmless = adds | (weight == 0)
    # of what the last window left there
    held = gradient_sum.emptied(state.accumulator, fields[0] == 0)
    total = gradient_sum.add(held, gradients, factor, adds, harmless)
    counted = with_fields(state, accumulate(fields, weight, finite, jnp.where))
    terms = like(current_terms(options, steps), state.terms)
    counted = counted._replace(accumulator=total, terms=terms)
    added = extensions.add(counted, loss, weight, adds, options)
    return added, ~harmless if dropping else False


class Ending(NamedTuple):
    """The results of a window's end, without the update."""

    state: AccumulationState
    """The state of a window that makes no update, `bare` of its trees."""
    total: Tree
    """The sum of all devices that share the window; None if they do not."""
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
    tells: bool,
    denominator: Scalar = None,
) -> tuple[Updates, AccumulationState]:
    """Close the window where it ends: make its update or skip it, and count that;
    elsewhere return zeros and leave `event`.

    All numbers come from two kernels: those of the micro-batch from the first, those of
    a window that ends from the second.
    """
    require_told(state.accumulator, frozenset(update.axes), update.shard_axes, options)

    def end(start: Ending) -> Ending:
        decision, whole, divides = decide_on(
            state, start.total, update, options, one, denominator
        )
        loss = kit.window_loss(whole.loss, whole.fields, divides, jnp.where)
        closed = with_fields(
            bare, _closed(whole.fields, decision.apply, decision.overflow, options)
        )
        norm = like(as_stored(decision.grad_norm), state.last_grad_norm)
        ended = with_event(
            extensions.close(closed, loss)._replace(last_grad_norm=norm),
            decision.apply,
            ~decision.apply,
            decision.overflow,
        )
        ended, *told = together((ended, decision.apply, decision.divisor, loss))
        return Ending(ended, whole.total if update.axes else None, *told)

    numbers = (
        at_end,
        {
            name: getattr(state, name)
            for name in ("micro_step", "weight", "overflow", "loss")
        },
    )
    # Beside large tensors, which XLA of JAX 0.7 cuts up for its threads, one kernel
    # more before the conditional costs 30 us.
    at_end, counted = (
        together(numbers) if gradient_sum.are_small(state.accumulator) else numbers
    )
    state = state._replace(**counted)
    bare = with_event(
        state._replace(accumulator=None, inner_state=None, masters=None, terms=None),
        *event,
    )
    nothing, one = jnp.zeros_like(state.weight), at_end.astype(state.weight.dtype)
    start = Ending(
        bare,
        state.accumulator if update.axes else None,
        jnp.asarray(False),
        nothing + 1,
        nothing,
    )
    ended, total, apply, divisor, loss = once(at_end, end, start)
    total = total if update.axes else state.accumulator
    update, held = (
        update.told(loss) if tells else update,
        (state.inner_state, state.masters),
    )
    traced = update.traced(total, held, divisor)
    updates, total, held = update.run(total, held, divisor, traced, apply)
    # On its way out of `data_parallel` a device's sum gets a leading axis, for which
    # XLA would copy it; a select is written in place.
    total = gradient_sum.emptied(total, at_end) if update.axes else total
    return updates, ended._replace(
        accumulator=total, inner_state=held[0], masters=held[1], terms=state.terms
    )


def _closed(
    fields: Fields, apply: Scalar, overflow: Scalar, options: Options
) -> Fields:
    closed, rule = (
        close_fields(fields, apply, overflow, options, jnp.where),
        options.scale_rule,
    )
    # XLA does not see that a static scale, whose factors are 1, and its tracker never
    # move.
    return (
        (*closed[:5], *fields[5:])
        if rule.growth_factor == rule.backoff_factor
        else closed
    )


def keep(
    state: AccumulationState,
    update: Update,
    options: Options,
    *,
    never: Scalar,
    event: Event,
    tells: bool,
) -> tuple[Updates, AccumulationState]:
    """Replace `close` in a window that only the caller closes."""
    update = update.told(jnp.zeros_like(state.loss)) if tells else update
    require_told(state.accumulator, frozenset(update.axes), update.shard_axes, options)
    traced = update.traced(
        state.accumulator,
        (state.inner_state, state.masters),
        jnp.ones_like(state.weight),
    )
    updates, total = update.keep(state.accumulator, traced.updates, never)
    return updates, with_event(state._replace(accumulator=total), *event)


def discard(state: AccumulationState) -> AccumulationState:
    emptied = extensions.discard(with_fields(state, discard_fields(fields_of(state))))
    return with_event(
        emptied._replace(accumulator=gradient_sum.clear(state.accumulator)),
        False,
        False,
        False,
    )


# The end of a window: the norm of its sum, and the decision on it.
#
# With ``on_overflow="ignore"`` and no option that asks for the norm, nothing is
# measured.


class Whole(NamedTuple):
    """The window that is decided on: that of all devices that share it."""

    fields: Fields
    total: Tree
    loss: Scalar
    """The sum of its losses."""


def decide_on(
    state: AccumulationState,
    total: Tree,
    update: Update,
    options: Options,
    one: Scalar,
    denominator: Scalar,
) -> tuple[Decision, Whole, Options]:
    """Return the decision on the window that ends here, the window, and the options
    under which it is divided; `total` is this device's sum.
    """
    dtype = jnp.result_type(state.weight)
    whole = _joined(state, total, update.axes) if update.axes else _own(state)
    fields = whole.fields
    divides = options
    if denominator is not None:
        fields, divides = kit.with_denominator(fields, denominator, options, jnp.where)
    norm, finite = jnp.full((), jnp.nan, dtype), jnp.asarray(True)
    if measures(options):
        norm, finite = measure(whole.total, one, whole.fields[3], update.shard_axes)
        fitting = gradient_sum.fits(
            whole.total, divisor(fields, divides, jnp.where), update.dtypes.like
        )
        finite = finite & everywhere(fitting, update.shard_axes)
    decision = Decision(
        *decide(fields, norm, finite, divides, jnp.where, float(jnp.finfo(dtype).max))
    )
    return decision, whole._replace(fields=fields), divides


def _own(state: AccumulationState) -> Whole:
    return Whole(fields_of(state), state.accumulator, as_read(state.loss))


def _joined(state: AccumulationState, total: Tree, axes: tuple[str, ...]) -> Whole:
    window = all_reduce(
        Window(total, state.weight, state.overflow, as_read(state.loss)), axes
    )
    fields = joined(fields_of(state), window.weight, window.overflow)
    return Whole(fields, window.accumulator, window.loss)


# The size of a window where a callable in ``steps`` says it. The size is checked as far
# as it is known.
#
# A concrete value is checked as in every backend. Of a traced one only the dtype is
# known. If it turns out below 1, each micro-batch counts as not finite, so that no
# update is made and the result says so.


def size_at(schedule: kit.Schedule, optimizer_step: Scalar) -> Scalar:
    """Return the size of the window after update number `optimizer_step`, int32; or an
    `UntilWeight` of it.
    """
    size = kit.steps_at(schedule, optimizer_step, jnp.where)
    if kit.is_known(schedule):
        return size
    number = number_of(size) if isinstance(schedule, kit.UntilWeight) else size
    if not isinstance(number, jax.core.Tracer):
        return kit.require_steps(size, _number(optimizer_step), schedule)
    if number.shape != () or not jnp.issubdtype(number.dtype, jnp.integer):
        found, fix = (
            f"one of dtype {number.dtype} and shape {number.shape}",
            "Cast what it returns: .astype(jnp.int32).",
        )
        raise explain(
            ArgumentTypeError,
            "steps(optimizer_step)",
            expected="an integer scalar",
            found=found,
            fix=fix,
        )
    return size


def number_of(size: Scalar) -> Scalar:
    return size.weight if isinstance(size, kit.UntilWeight) else size


def probe(schedule: kit.Schedule) -> None:
    """Check the first window's size before tracing, with NumPy's 0, because `wrap`
    alone starts no device.
    """
    if not kit.is_known(schedule):
        with jax.ensure_compile_time_eval():
            size_at(schedule, np.zeros((), np.int32))


def check_known(schedule: kit.Schedule, optimizer_step: Scalar) -> None:
    """Check the open window's size if a loop outside `jax.jit` knows it. Only for a
    callable it waits for the last update.
    """
    if not kit.is_known(schedule) and not isinstance(optimizer_step, jax.core.Tracer):
        size_at(schedule, jnp.asarray(optimizer_step))


def _number(optimizer_step: Scalar) -> int:
    return (
        cast(int, "optimizer_step")
        if isinstance(optimizer_step, jax.core.Tracer)
        else int(np.asarray(optimizer_step))
    )
