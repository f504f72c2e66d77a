"""The state machine, written once: what a micro-batch, the end of a window and a discard do to the state.

Everything here is arithmetic, comparison, ``&``, ``|`` and one passed-in ``where``; no Python ``if`` ever looks at a
value of the state. So the same source runs on Python numbers (torch), is traced by JAX and is compiled by MindSpore. That is
why ``x == False`` stands where Python would say ``not x``, why constants are derived from a field (``0 * micro_step``: a compiled
field must never turn into a bare Python number), and why a state comes in and goes out as a plain tuple in the order of `State`'s
fields: MindSpore compiles those into the graph, but hands a named tuple back to the interpreter. ``if`` on an option is fine:
options are constants of the program.

A backend calls, in this order:

- ``accumulate`` for each micro-batch, then ``is_full`` to learn whether the window ends here;
- at its end ``decide`` with the norm it measured, then acts on the `Decision`, then ``close``;
- ``discard`` to forget an open window.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from gradaccum.loss_scale import ScaleRule
    from gradaccum.options import Options

Fields = tuple[Any, Any, Any, Any, Any, Any, Any]
"""A state as a plain tuple, in the order of the fields of `State` (which is one)."""

FLOAT32_MAX = 3.4028234663852886e38
FLOAT32_TINY, FLOAT64_TINY = 2.0**-126, 2.0**-1022
"""The smallest normal numbers. XLA takes what is smaller for 0."""
INFINITY = float("inf")


class Where(Protocol):
    """``where(condition, a, b)``: `a` where `condition` holds, else `b`, elementwise."""

    def __call__(self, condition: Any, a: Any, b: Any, /) -> Any: ...


class Decision(NamedTuple):
    """What a window's end asks of the backend: ``Decision(*decide(...))``. Every field is a scalar."""

    apply: Any
    """bool: run the inner optimizer, once; otherwise not at all."""
    overflow: Any
    """bool: the window held a non-finite gradient (or a dropped micro-batch did)."""
    divisor: Any
    """float: accumulator / divisor is the gradient for the inner optimizer: loss scale, denominator and clipping in one."""
    grad_norm: Any
    """float: global 2-norm of the window's true gradient, before clipping; inf when it is not finite."""


def select(condition: Any, a: Any, b: Any) -> Any:
    """``where`` for Python numbers."""
    return a if condition else b


def accumulate(state: Fields, weight: Any, finite: Any, where: Where) -> Fields:
    """Count one micro-batch.

    Args:
        state: the state before it.
        weight: its weight, a scalar >= 0. One that is negative or not finite, which only compiled code can let through, is
            treated as a gradient that is not finite.
        finite: bool, False if its gradient is known to hold an inf or NaN; its weight is then left out.
        where: the backend's `Where`.
    """
    micro_step, optimizer_step, skipped_windows, total, overflow, loss_scale, growth_tracker = state
    good = finite & (weight >= 0) & (total + weight < INFINITY)
    return (
        micro_step + 1,
        optimizer_step,
        skipped_windows,
        where(good, total + weight, total),
        overflow | (good == False),  # noqa: E712
        loss_scale,
        growth_tracker,
    )


def is_full(state: Fields, steps: Any) -> Any:
    """Whether the window holds `steps` micro-batches, so that it ends now."""
    return state[0] >= steps


def decide(
    state: Fields, norm: Any, finite: Any, options: Options, where: Where, largest: float = FLOAT32_MAX
) -> tuple[Any, Any, Any, Any]:
    """What to do with the window that ends here: the fields of a `Decision`.

    A divisor beyond the sums' dtype would turn the gradient into 0, one below it into inf, and either would count as applied. So such a
    window is an overflow: no update is made, and the loss scale, which is what grew or shrank too far, backs off.

    Args:
        state: the state after its last micro-batch.
        norm: global 2-norm of the accumulator as it is (still scaled, not yet divided).
        finite: bool, whether every element of the accumulator is finite. Apart from `norm`, because the squares of large finite
            gradients may overflow, which is no reason to skip.
        options: the validated options.
        where: the backend's `Where`.
        largest: the largest finite number of the dtype of the sums' division: float32's, or float64's where `weight` is float64.
    """
    _, _, _, weight, overflow, loss_scale, _ = state
    one = 0 * weight + 1
    divisor = loss_scale * _denominator(weight, options, where)
    smallest = FLOAT32_TINY if largest == FLOAT32_MAX else FLOAT64_TINY
    usable = (divisor >= smallest) & (divisor <= largest)
    finite = finite & usable
    grad_norm = where(finite, norm / where(usable, divisor, one), INFINITY + one)
    overflow = overflow | (finite == False)  # noqa: E712
    apply = finite & (weight > 0)
    if options.on_overflow == "skip_window":
        apply = apply & (overflow == False)  # noqa: E712
    if options.skip_norm is not None:
        apply = apply & (grad_norm <= options.skip_norm)
    if options.clip_norm is not None:
        excess = grad_norm / options.clip_norm
        clipping = divisor * where(apply & (excess > 1), excess, one)
        overflow = overflow | (apply & (clipping > largest))
        apply = apply & (clipping <= largest)
        divisor = where(apply, clipping, divisor)
    return apply, overflow, divisor, grad_norm


def close(state: Fields, apply: Any, overflow: Any, options: Options, where: Where) -> Fields:
    """The state after the window: counters moved, the window empty, the loss scale adjusted.

    Args:
        state: the state that was decided on.
        apply: bool, the decision's: whether the update was made.
        overflow: bool, the decision's.
        options: the validated options.
        where: the backend's `Where`.
    """
    micro_step, optimizer_step, skipped_windows, weight, _, loss_scale, growth_tracker = state
    applied = where(apply, 0 * micro_step + 1, 0 * micro_step)
    clean = (overflow == False) & (weight > 0)  # noqa: E712
    loss_scale, growth_tracker = _adjust_scale(loss_scale, growth_tracker, overflow, clean, options.scale_rule, where)
    return discard((micro_step, optimizer_step + applied, skipped_windows + 1 - applied, weight, overflow, loss_scale, growth_tracker))


def discard(state: Fields) -> Fields:
    """The state with the open window forgotten: no update, nothing counted, the loss scale untouched."""
    micro_step, optimizer_step, skipped_windows, weight, _, loss_scale, growth_tracker = state
    return 0 * micro_step, optimizer_step, skipped_windows, 0 * weight, micro_step < 0, loss_scale, growth_tracker


def contribution(weight: Any, options: Options) -> Any:
    """What a micro-batch's gradient is multiplied by as it is added: w_i for ``"mean"``, else 1."""
    return weight if options.reduction == "mean" else 0 * weight + 1


def _denominator(weight: Any, options: Options, where: Where) -> Any:
    one = 0 * weight + 1
    return one if options.reduction == "sum" else where(weight > 0, weight, one)


def _adjust_scale(scale: Any, tracker: Any, overflow: Any, clean: Any, rule: ScaleRule, where: Where) -> tuple[Any, Any]:
    """Back off after an overflow, grow after `growth_interval` clean windows; a window of weight 0 is neither.

    The rule is `torch.amp.GradScaler`'s, with a floor and a ceiling.
    """
    backed_off = scale * rule.backoff_factor
    backed_off = where(backed_off > rule.min_scale, backed_off, rule.min_scale + 0 * scale)
    grown = scale * rule.growth_factor
    grown = where(grown < rule.max_scale, grown, rule.max_scale + 0 * scale)
    grown = where(grown <= FLOAT32_MAX, grown, scale)
    due = clean & (tracker + 1 >= rule.growth_interval)
    return (
        where(overflow, backed_off, where(due, grown, scale)),
        where(overflow | due, 0 * tracker, where(clean, tracker + 1, tracker)),
    )
