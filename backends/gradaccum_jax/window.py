"""The open window: take in a micro-batch, close the window where it ends, forget it.

These are pure functions of the state. Only the device knows whether a window ends, so every micro-batch runs one program: `add`, then
`close`, which changes the state only if `at_end` holds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np

from gradaccum import ArgumentTypeError, kit
from gradaccum.kit import Decision, Fields, Options, Scalar, accumulate, contribution, decide, divisor, explain, joined, measures, usable
from gradaccum.kit import close as close_fields
from gradaccum.kit import discard as discard_fields
from gradaccum_jax import statistics, sums
from gradaccum_jax.arrays import Gradients, Tree, Updates
from gradaccum_jax.control_flow import once
from gradaccum_jax.sharding import ShardAxes, everywhere
from gradaccum_jax.state import AccumulationState, as_read, as_stored, current_terms, fields_of, like, with_event, with_fields
from gradaccum_jax.statistics import Firsts
from gradaccum_jax.sums import measure
from gradaccum_jax.update import Traced, Update
from gradaccum_jax.workers.group import Window, all_reduce, require_told


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
    """Add a micro-batch's gradient to the sum, and count it.

    Returns:
        The state with the micro-batch in it, and a bool scalar: it was dropped.
    """
    gradients, weight, loss = micro_batch
    given, one, fields = weight is not None, jnp.ones_like(state.weight), fields_of(state)
    factor = contribution(weight, options) if given and options.reduction == "mean" else None
    weight = weight if given else one
    dropping = options.on_overflow == "drop_micro_batch"
    finite = everywhere(sums.all_finite(gradients), shard_axes) if dropping else jnp.asarray(True)
    finite = finite if kit.is_known(options.steps) else finite & (number_of(steps) >= 1)
    # Only the running program knows this, as it looks at the total. XLA:CPU vectorises select(add), but compiles a bare in-place add to a
    # scalar loop.
    adds = usable(fields, weight, finite)
    harmless = adds | (weight == 0)
    held = sums.emptied(state.accumulator, fields[0] == 0)  # of what the last window left there
    total = sums.add(held, gradients, factor, adds, harmless)
    counted = with_fields(state, accumulate(fields, weight, finite, jnp.where))
    terms = like(current_terms(options, steps), state.terms)
    counted = counted._replace(accumulator=total, terms=terms)
    return statistics.add(counted, loss, weight, adds, options, shard_axes), ~harmless if dropping else False


def close(
    state: AccumulationState,
    update: Update,
    options: Options,
    *,
    at_end: Scalar,
    dropped: Scalar = False,
    tells: bool = True,
    denominator: Scalar = None,
) -> tuple[Updates, AccumulationState]:
    """Close the window where it ends: make its update or skip it, and count that.

    Returns:
        The updates (zeros if none was made) and the state.
    """
    decision, whole, options = decide_on(state, update, options, at_end, denominator)
    loss = kit.window_loss(whole.loss, whole.fields, options, jnp.where)
    update = update.told(loss) if tells else update
    traced, held = _traced(state, update, options, decision.divisor), (state.inner_state, state.masters)
    apply, overflow = at_end & decision.apply, decision.overflow
    updates, total, held = update.run(whole.total, held, decision.divisor, traced, apply)
    fields = _where(at_end, close_fields(whole.fields, apply, overflow, options, jnp.where), fields_of(state))
    # On its way out of `data_parallel` a device's sum gets a leading axis, for which XLA would copy it; a select is written in place.
    total = sums.emptied(total, at_end) if update.axes else total
    norm = jnp.asarray(jnp.where(at_end, as_stored(decision.grad_norm), state.last_grad_norm), jnp.result_type(state.last_grad_norm))
    state = statistics.close(state, loss, whole.firsts, decision.grad_norm, whole.fields, options, at_end)
    ended = with_fields(state, fields)._replace(accumulator=total, inner_state=held[0], masters=held[1], last_grad_norm=norm)
    return updates, with_event(ended, apply, at_end & ~apply, jnp.where(at_end, overflow, dropped))


def keep(
    state: AccumulationState, update: Update, options: Options, *, never: Scalar, dropped: Scalar, tells: bool
) -> tuple[Updates, AccumulationState]:
    """Replace `close` in a window that only the caller closes: zeros, and the sum as it is."""
    never = never if state.noise is None else never & (state.weight >= 0)  # always so, but see `statistics.add`
    update = update.told(jnp.zeros_like(state.loss)) if tells else update
    traced = _traced(state, update, options, jnp.ones_like(state.weight))
    updates, total = update.keep(state.accumulator, traced.updates, never)
    return updates, with_event(state._replace(accumulator=total), False, False, dropped)


def discard(state: AccumulationState) -> AccumulationState:
    emptied = statistics.discard(with_fields(state, discard_fields(fields_of(state))))
    return with_event(emptied._replace(accumulator=sums.clear(state.accumulator)), False, False, False)


def _traced(state: AccumulationState, update: Update, options: Options, divisor: Scalar) -> Traced:
    require_told(state.accumulator, frozenset(update.axes), update.shard_axes, options)
    return update.traced(state.accumulator, (state.inner_state, state.masters), divisor)


def _where(condition: Scalar, a: Fields, b: Fields) -> Fields:
    return tuple([jnp.where(condition, new, old) for new, old in zip(a, b, strict=True)])


# The end of a window: the norm of its sum, and the decision on it.
#
# With ``on_overflow="ignore"`` and no option that asks for the norm, nothing is measured: the decision is made of scalars alone.


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


def decide_on(
    state: AccumulationState, update: Update, options: Options, at_end: Scalar, denominator: Scalar = None
) -> tuple[Decision, Whole, Options]:
    """Return the decision, the window, and the options under which it is divided. If the window goes on, nothing is measured."""
    dtype, measuring = jnp.result_type(state.weight), measures(options)
    start = (jnp.full((), 0 if measuring else jnp.nan, dtype), jnp.asarray(True))

    def look(fields: Fields, accumulator: Tree) -> tuple[Scalar, Scalar]:
        norm, finite = measure(accumulator, dtype, update.shard_axes)
        fitting = sums.fits(accumulator, divisor(*_divided(fields, options, denominator), jnp.where), update.dtypes.like)
        return norm, finite & everywhere(fitting, update.shard_axes)

    if update.axes:
        whole, norm, finite = _join(state, look if measuring else lambda *_: start, update, at_end)
    else:
        whole = Whole(fields_of(state), state.accumulator, as_read(state.loss), statistics.firsts_of(state))
        norm, finite = once(at_end, lambda _: look(whole.fields, whole.total), start) if measuring else start
    fields, options = _divided(whole.fields, options, denominator)
    decision = Decision(*decide(fields, norm, finite, options, jnp.where, float(jnp.finfo(dtype).max)))
    if measuring and options.on_overflow == "ignore":
        # Never below 0. Nothing else tells XLA to measure the sum before the optimizer's updates take its place: see `statistics.add`.
        decision = decision._replace(divisor=jnp.where(norm < 0, norm, decision.divisor))
    return decision, whole._replace(fields=fields), options


def _divided(fields: Fields, options: Options, denominator: Scalar) -> tuple[Fields, Options]:
    """Return both as they are divided by, where the caller chose a denominator."""
    return (fields, options) if denominator is None else kit.with_denominator(fields, denominator, options, jnp.where)


def _join(state: AccumulationState, look: Look, update: Update, at_end: Scalar) -> tuple[Whole, Scalar, Scalar]:
    """Return the window of all devices where it ends, and what `look` says of it; elsewhere this device's own sum.

    Everything but the sum starts with numbers that are the same on all devices, so that its type says so at the end too.
    """
    fields, nothing = fields_of(state), jnp.zeros((), jnp.result_type(state.weight))
    own = Window(state.accumulator, state.weight, state.overflow, as_read(state.loss), statistics.addends(state))

    def add_up(held: Held) -> Held:
        whole = all_reduce(own._replace(accumulator=held[0].accumulator), update.axes)
        return whole, *look(joined(fields, whole.weight, whole.overflow), whole.accumulator)

    empty = Window(state.accumulator, nothing, jnp.asarray(False), nothing, tuple(nothing for _ in own.firsts))
    window, norm, finite = once(at_end, add_up, (empty, nothing, jnp.asarray(True)))
    fields = joined(fields, window.weight, window.overflow)
    return Whole(fields, window.accumulator, window.loss, statistics.averaged(window.firsts, state)), norm, finite


# The size of a window where a callable in ``steps`` says it. The size is checked as far as it is known.
#
# A concrete value is checked as in every backend. Of a traced one only the dtype is known. If it turns out below 1, each micro-batch counts
# as not finite, so that no update is made and the result says so.


def size_at(schedule: kit.Schedule, optimizer_step: Scalar) -> Scalar:
    """Return the size of the window that follows update number `optimizer_step`, an int32 scalar; or an `UntilWeight` of it."""
    size = kit.steps_at(schedule, optimizer_step, jnp.where)
    if kit.is_known(schedule):
        return size
    number = number_of(size) if isinstance(schedule, kit.UntilWeight) else size
    if not isinstance(number, jax.core.Tracer):
        return kit.require_steps(size, _number(optimizer_step), schedule)
    if number.shape != () or not jnp.issubdtype(number.dtype, jnp.integer):
        found, fix = f"one of dtype {number.dtype} and shape {number.shape}", "Cast what it returns: .astype(jnp.int32)."
        raise explain(ArgumentTypeError, "steps(optimizer_step)", expected="an integer scalar", found=found, fix=fix)
    return size


def number_of(size: Scalar) -> Scalar:
    return size.weight if isinstance(size, kit.UntilWeight) else size


def probe(schedule: kit.Schedule) -> None:
    """Check the first window's size before tracing, with NumPy's 0, because `wrap` alone starts no device."""
    if not kit.is_known(schedule):
        with jax.ensure_compile_time_eval():
            size_at(schedule, np.zeros((), np.int32))


def check_known(schedule: kit.Schedule, optimizer_step: Scalar) -> None:
    """Check the open window's size if a loop outside `jax.jit` knows it. Only for a callable it waits for the last update."""
    if not kit.is_known(schedule) and not isinstance(optimizer_step, jax.core.Tracer):
        size_at(schedule, jnp.asarray(optimizer_step))


def _number(optimizer_step: Scalar) -> int:
    """Return the step for an error's text; a name in its place if it is traced."""
    return cast(int, "optimizer_step") if isinstance(optimizer_step, jax.core.Tracer) else int(np.asarray(optimizer_step))
