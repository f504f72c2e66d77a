"""The state machine: how a micro-batch, the end of a window and a discard change the
state.

The same source runs on Python numbers (torch), is traced by JAX and is compiled by
MindSpore. Therefore the code uses only arithmetic, comparisons, ``&``, ``|`` and the
backend's `Where`, and no Python ``if`` depends on a value of the state.

In code that MindSpore compiles, every field must stay a Tensor, because a Python number
would become a constant of the compiled program. So the code contains ``x == False``
instead of ``not x``, and constants are derived from a field, as in ``0 * micro_step``.
A state is a plain tuple, because MindSpore cannot compile a named tuple. An ``if`` may
depend on the checked ``options``, because they are constants of the program.

For each micro-batch, a backend calls ``usable``, ``contribution``, ``accumulate`` and
``ends``, in this order. At the window's end it calls ``joined`` (if several workers
share the window), ``decide`` with the measured norm, and ``close``. ``discard`` drops
an open window.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

from gradaccum.options import UntilWeight
from gradaccum.state import Scalar

if TYPE_CHECKING:
    from gradaccum.options import Options, ScaleRule, Schedule

Fields = tuple[Scalar, Scalar, Scalar, Scalar, Scalar, Scalar, Scalar]
"""A state as a plain tuple, in the order of the fields of `State`."""

FLOAT32_MAX = 3.4028234663852886e38
FLOAT32_TINY, FLOAT64_TINY = 2.0**-126, 2.0**-1022
"""The smallest normal numbers of float32 and float64. XLA treats smaller numbers as 0.
"""
INFINITY = float("inf")


class Where(Protocol):
    """The type of ``where(condition, a, b)``, which returns `a` where `condition` is
    true and `b` elsewhere, element by element.
    """

    def __call__(self, condition: Scalar, a: Scalar, b: Scalar, /) -> Scalar: ...


class Decision(NamedTuple):
    """The decision about what happens at a window's end. Create it with
    ``Decision(*decide(...))``. Every field is a scalar.
    """

    apply: Scalar
    """bool: True if the inner optimizer must apply its update."""
    overflow: Scalar
    """bool: True if the window's gradient was not finite, or if the window dropped a
    micro-batch whose gradient was not finite.
    """
    divisor: Scalar
    """float: the number by which the gradient sum is divided to get the gradient for
    the inner optimizer. It combines the loss scale, the denominator and clipping.
    """
    grad_norm: Scalar
    """float: the global 2-norm of the window's gradient, without the loss scale and
    before clipping. It is inf if the gradient is not finite.
    """


def select(condition: Scalar, a: Scalar, b: Scalar) -> Scalar:
    """Return `a` if `condition` is true, else `b`. This is the ``where`` function for
    Python numbers.
    """
    return a if condition else b


def accumulate(state: Fields, weight: Scalar, finite: Scalar, where: Where) -> Fields:
    """Return the state after one more micro-batch.

    - `weight`: a scalar >= 0. A micro-batch with any other weight is treated as if its
      gradient were not finite. Outside compiled code, an earlier check has already
      rejected such a weight.
    - `finite`: bool, False if the gradient is known to contain an inf or NaN. The
      micro-batch's weight is then not added.
    """
    (
        micro_step,
        optimizer_step,
        skipped_windows,
        total,
        overflow,
        loss_scale,
        growth_tracker,
    ) = state
    # Add the weight even if it is 0, because the user may differentiate the total with
    # respect to the weight.
    harmless = usable(state, weight, finite) | (weight == 0)
    return (
        micro_step + 1,
        optimizer_step,
        skipped_windows,
        where(harmless, total + weight, total),
        overflow | (harmless == False),  # noqa: E712
        loss_scale,
        growth_tracker,
    )


def usable(state: Fields, weight: Scalar, finite: Scalar) -> Scalar:
    """True if the micro-batch counts: its gradient is added to the sum, and its weight
    to the total.

    A micro-batch of weight 0 adds nothing, whatever its gradient is. A micro-batch
    whose weight is negative or not finite, or would make the total infinite, also adds
    nothing; `accumulate` then sets the overflow flag. The arguments are the same as for
    `accumulate`.
    """
    return finite & (weight > 0) & (state[3] + weight < INFINITY)


def contribution(weight: Scalar, options: Options) -> Scalar:
    """Return the factor by which a micro-batch's gradient is multiplied before it is
    added to the sum: its weight for ``reduction="mean"``, else 1.
    """
    return weight if options.reduction == "mean" else 0 * weight + 1


def steps_at(schedule: Schedule, optimizer_step: Scalar, where: Where) -> Scalar:
    """Return the size of the window that begins after `optimizer_step` updates, or None
    if the caller closes the window.

    - `schedule`: `Options.steps`. `gradaccum.kit.require_steps` checks what a callable
      returned.
    - `optimizer_step`: an integer scalar.
    """
    if isinstance(schedule, UntilWeight):
        return UntilWeight(steps_at(schedule.weight, optimizer_step, where))
    if callable(schedule):
        return schedule(optimizer_step)
    if isinstance(schedule, tuple):
        steps = 0 * optimizer_step + schedule[0][1]
        for first, count in schedule[1:]:
            steps = where(optimizer_step >= first, 0 * optimizer_step + count, steps)
        return steps
    return schedule


def ends(state: Fields, steps: Schedule | Scalar, where: Where) -> Scalar:
    """True if the window ends with the micro-batch that was added last. If the size is
    None, the result is always False, because only the caller ends such a window.

    - `state`: the state after the micro-batch.
    - `steps`: the size of this window, or a schedule from which `steps_at` gets the
      size.
    """
    size = steps_at(steps, state[1], where)
    if isinstance(size, UntilWeight):
        return state[3] >= size.weight
    return state[0] < 0 if size is None else state[0] >= size


def joined(state: Fields, weight: Scalar, overflow: Scalar) -> Fields:
    """Return the state at the end of a window that several workers share. The combined
    weight and overflow flag of all workers replace the worker's own.

    - `state`: the state of one worker.
    - `weight`: the sum of the weights of all workers.
    - `overflow`: bool, True if the overflow flag of any worker is True.
    """
    return (*state[:3], weight, overflow, *state[5:])


def divisor(state: Fields, options: Options, where: Where) -> Scalar:
    """Return the number by which the window's gradient sum is divided before clipping:
    the loss scale times the denominator.
    """
    return state[5] * denominator(state[3], options, where)


def denominator(weight: Scalar, options: Options, where: Where) -> Scalar:
    """Return the number by which the gradient sum of a window, or of a large batch, is
    divided if the total weight is `weight`. The number is 1 if ``reduction="sum"`` or
    if the weight is 0. Otherwise it is the weight.
    """
    one = 0 * weight + 1
    return one if options.reduction == "sum" else where(weight > 0, weight, one)


def with_denominator(
    state: Fields, denominator: Scalar, options: Options, where: Where
) -> tuple[Fields, Options]:
    """Return a state and options with which `divisor`, `decide` and
    `gradaccum.kit.window_loss` divide by `denominator` instead of the window's weight.
    To achieve this, the denominator replaces the weight in the state, and
    "sum_per_item" replaces the reduction "sum". A weight of 0 is not replaced, so that
    `decide` still skips the window.

    - `state`: the state of all workers after the window's last micro-batch.
    - `denominator`: a finite scalar > 0. With any other value, `decide` skips the
      window.
    """
    weight = state[3]
    weight = where(weight > 0, denominator + 0 * weight, weight)
    if options.reduction == "sum":
        options = options._replace(reduction="sum_per_item")
    return (*state[:3], weight, *state[4:]), options


def decide(
    state: Fields,
    norm: Scalar,
    finite: Scalar,
    options: Options,
    where: Where,
    largest: float = FLOAT32_MAX,
) -> tuple[Scalar, Scalar, Scalar, Scalar]:
    """Decide what happens at the end of a window, and return the fields of a
    `Decision`.

    A window counts as an overflow if its divisor is outside the range of the sums'
    dtype, because such a divisor would silently make the gradient 0 or inf. With
    ``on_overflow="ignore"``, a sum that is not finite is used for the update without
    clipping.

    - `state`: the state after the window's last micro-batch.
    - `norm`: the global 2-norm of the undivided gradient sum, which includes the loss
      scale; NaN if the norm was not measured.
    - `finite`: bool, True if every element of the gradient sum is finite, or if the
      elements were not checked. It cannot be derived from `norm`, because the squares
      of large finite gradients may overflow.
    - `largest`: the largest number of the dtype in which gradient sums are divided.
      This dtype is float64 if the weight in `state` is float64.
    """
    weight = state[3]
    overflow = state[4]
    one = 0 * weight + 1
    divides = divisor(state, options, where)
    smallest = FLOAT32_TINY if largest == FLOAT32_MAX else FLOAT64_TINY
    in_range = (divides >= smallest) & (divides <= largest)
    finite = finite & in_range
    grad_norm = where(finite, norm / where(in_range, divides, one), INFINITY + one)
    overflow = overflow | (finite == False)  # noqa: E712
    ignoring = options.on_overflow == "ignore"
    apply = (in_range & (state[4] == False) if ignoring else finite) & (weight > 0)  # noqa: E712
    if options.on_overflow == "skip_window":
        apply = apply & (overflow == False)  # noqa: E712
    if options.skip_norm is not None:
        apply = apply & (grad_norm <= options.skip_norm)
    if options.clip_norm is not None:
        excess = grad_norm / options.clip_norm
        if ignoring:
            excess = where(finite, excess, one)
        clipping = divides * where(apply & (excess > 1), excess, one)
        overflow = overflow | (apply & (clipping > largest))
        apply = apply & (clipping <= largest)
        divides = where(apply, clipping, divides)
    return apply, overflow, divides, grad_norm


def measures(options: Options) -> bool:
    """True if the norm of the gradient sum is needed at the end of a window: to clip
    the gradient, to skip the window, or to detect an overflow.
    """
    limited = options.clip_norm is not None or options.skip_norm is not None
    return limited or options.on_overflow != "ignore"


def close(
    state: Fields, apply: Scalar, overflow: Scalar, options: Options, where: Where
) -> Fields:
    """Return the state after the window has closed: the counters are updated, the
    window is empty, and the loss scale is adjusted.

    - `state`: the state that was passed to `decide`.
    - `apply`: `Decision.apply`.
    - `overflow`: `Decision.overflow`.
    """
    (
        micro_step,
        optimizer_step,
        skipped_windows,
        weight,
        _,
        loss_scale,
        growth_tracker,
    ) = state
    applied = where(apply, 0 * micro_step + 1, 0 * micro_step)
    clean = (overflow == False) & (weight > 0)  # noqa: E712
    loss_scale, growth_tracker = _adjust_scale(
        loss_scale, growth_tracker, overflow, clean, options.scale_rule, where
    )
    return discard(
        (
            micro_step,
            optimizer_step + applied,
            skipped_windows + 1 - applied,
            weight,
            overflow,
            loss_scale,
            growth_tracker,
        )
    )


def discard(state: Fields) -> Fields:
    """Return the state without the open window. No update is applied, no counter
    increases, and the loss scale does not change.
    """
    micro_step, optimizer_step, skipped_windows, _, _, loss_scale, growth_tracker = (
        state
    )
    # Do not use 0 * weight: a weight that was summed over several workers may be
    # infinite, and 0 times infinity is NaN.
    return (
        0 * micro_step,
        optimizer_step,
        skipped_windows,
        0 * loss_scale,
        micro_step < 0,
        loss_scale,
        growth_tracker,
    )


def _adjust_scale(
    scale: Scalar,
    tracker: Scalar,
    overflow: Scalar,
    clean: Scalar,
    rule: ScaleRule,
    where: Where,
) -> tuple[Scalar, Scalar]:
    """Return the loss scale and the growth tracker after a window. The scale decreases
    after an overflow, and grows after `growth_interval` windows without an overflow. A
    window of weight 0 without an overflow changes neither number.

    The rule is the same as in `torch.amp.GradScaler`, except that the scale also has a
    lower and an upper bound.
    """
    smaller_scale = scale * rule.backoff_factor
    smaller_scale = where(
        smaller_scale > rule.min_scale, smaller_scale, rule.min_scale + 0 * scale
    )
    larger_scale = scale * rule.growth_factor
    larger_scale = where(
        larger_scale < rule.max_scale, larger_scale, rule.max_scale + 0 * scale
    )
    larger_scale = where(larger_scale <= FLOAT32_MAX, larger_scale, scale)
    due = clean & (tracker + 1 >= rule.growth_interval)
    return (
        where(overflow, smaller_scale, where(due, larger_scale, scale)),
        where(overflow | due, 0 * tracker, where(clean, tracker + 1, tracker)),
    )
