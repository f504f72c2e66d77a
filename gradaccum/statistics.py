"""Numbers beside an update: the window's loss, the gradient noise scale, and the
learning rate of a larger batch.

Losses of micro-batches are combined as their gradients are. The functions are
transitions, as in `gradaccum.transitions`, with the same ``options`` and ``where``. A
loss that was not passed is NaN, and makes the window's loss NaN.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal, NamedTuple

from gradaccum.errors import require_choice, require_int, require_number
from gradaccum.options import DECAY
from gradaccum.state import Scalar
from gradaccum.transitions import contribution

if TYPE_CHECKING:
    from gradaccum.options import Options
    from gradaccum.transitions import Fields, Where


def add_loss(
    total: Scalar,
    loss: Scalar,
    weight: Scalar,
    adds: Scalar,
    options: Options,
    where: Where,
) -> Scalar:
    """Return the sum of the open window's losses, `total`, after a micro-batch. It adds
    nothing if dropped, or of weight 0.

    - `total`: 0 at the window's start.
    - `loss`: the micro-batch's, a scalar, not scaled; NaN if none was passed.
    - `weight`: its weight, a scalar.
    - `adds`: bool: `gradaccum.kit.usable`.
    """
    return where(adds, total + contribution(weight, options) * loss, total)


def window_loss(total: Scalar, state: Fields, options: Options, where: Where) -> Scalar:
    """Return the loss of the ending window: weighted mean, sum or item mean by
    `reduction`; NaN for a window of weight 0.

    - `total`: from `add_loss`; summed over all workers that share the window.
    - `state`: the state that was decided on.
    """
    weight = state[3]
    one = 0 * weight + 1
    loss = (
        total if options.reduction == "sum" else total / where(weight > 0, weight, one)
    )
    # NaN times one would have the derivative NaN.
    return where(weight > 0, loss, float("nan") + one)


# The gradient noise scale: how large a batch is still worth it, from the gradients that
# a window sums anyway.
#
# The noise scale is tr(Sigma) / |G|^2, in items: Sigma is the covariance of one item's
# gradient, G the true gradient. Batches far below it are noise, and batches far above
# it repeat themselves (McCandlish et al., "An Empirical Model of Large-Batch Training",
# 2018, equation 2.8).
#
# Two squared norms of batches of different size tell both parts (there, appendix A.1):
# that of a mean gradient of w items is |G|^2 + tr(Sigma) / w on average. The small
# batch is the window's first micro-batch, and the large one is the window. So a window
# costs one norm more and no second buffer. The quotient of two averages is not the
# average of quotients, so both parts have running means. These begin at 0, which
# cancels in the quotient. Each function is a transition in the sense of
# `gradaccum.transitions`: it has one source everywhere.


SMALLEST, LARGEST = 2.0**-100, 2.0**100
"""Squared norms beyond these may leave float32's range: such a window is left out."""

NoiseFields = tuple[Scalar, Scalar, Scalar, Scalar]
"""A `Noise` as a plain tuple, for the same reason as `gradaccum.transitions.Fields`."""


class Noise(NamedTuple):
    """The measured noise. Every field is a scalar of the dtype of `State.weight`."""

    first_weight: Scalar
    """Weight of the open window's first micro-batch that added to the sum; 0 before it.
    """
    first_square: Scalar
    """Squared 2-norm of that micro-batch's mean gradient, unscaled."""
    trace: Scalar
    """Running mean of the estimates of tr(Sigma)."""
    square: Scalar
    """Running mean of the estimates of |G|^2."""


def no_noise() -> Noise:
    """Return the noise before the first micro-batch, in Python numbers."""
    return Noise(0.0, 0.0, 0.0, 0.0)


def is_first(noise: NoiseFields, state: Fields) -> Scalar:
    """True if the last micro-batch is the first of its window that added something, so
    that its norm must be measured.

    `noise` is from before the micro-batch, `state` from after it.
    """
    return (noise[0] == 0) & (state[3] > 0)


def first_seen(
    noise: NoiseFields, state: Fields, norm: Scalar, where: Where
) -> NoiseFields:
    """Return the noise after the micro-batch for which `is_first` holds, of the same
    arguments.

    `norm` is the 2-norm of the sum, which holds this micro-batch alone, weighted and
    scaled.
    """
    first, weight, loss_scale = is_first(noise, state), state[3], state[5]
    one = 0 * weight + 1
    mean = norm / (where(first, weight, one) * loss_scale)
    return (
        where(first, weight, noise[0]),
        where(first, mean * mean, noise[1]),
        noise[2],
        noise[3],
    )


def window_seen(
    noise: NoiseFields,
    state: Fields,
    grad_norm: Scalar,
    options: Options,
    where: Where,
    workers: Scalar = 1,
) -> NoiseFields:
    """Return the noise after a window, with its running means moved.

    A window of one micro-batch, or one whose gradient is not finite, moves nothing.

    - `noise`: with the first micro-batch; `joined_noise`, if several workers share the
      window.
    - `state`: what was decided on, of all workers.
    - `grad_norm`: `Decision.grad_norm`.
    - `workers`: how many of them had a first micro-batch.
    """
    small, first_square, trace, square = noise
    large = state[3]
    one = 0 * large + 1
    mean = (
        grad_norm / where(large > 0, large, one)
        if options.reduction == "sum"
        else grad_norm
    )
    whole_square = mean * mean
    more = workers * large - small
    tells = (small > 0) & (more > 0) & _in_range(first_square) & _in_range(whole_square)
    more = where(tells, more, one)
    first, whole = where(tells, first_square, one), where(tells, whole_square, one)
    # With n first micro-batches of b items in all, of B: b s + n tr = their sum, B s +
    # tr = the window's.
    new_trace = large * small * (first - whole) / more
    new_square = (workers * large * whole - small * first) / more
    keep = DECAY if options.noise_decay is None else options.noise_decay
    part = 1 - keep
    return (
        0 * small,
        0 * small,  # Not by the square itself, which may be inf.
        where(tells, keep * trace + part * new_trace, trace),
        where(tells, keep * square + part * new_square, square),
    )


def noise_shares(noise: NoiseFields, where: Where) -> tuple[Scalar, Scalar, Scalar]:
    """Return what the workers of a window sum over their first micro-batches: weight,
    weighted square, and 1 if there is one.
    """
    weight, square, _, _ = noise
    has_one, zero = weight > 0, 0 * weight
    return weight, where(has_one, weight * square, zero), where(has_one, zero + 1, zero)


def joined_noise(
    noise: NoiseFields, weight: Scalar, squares: Scalar, where: Where
) -> NoiseFields:
    """Return the noise of a window that several workers share, for `window_seen`.

    - `noise`: one worker's.
    - `weight`: the sum of their first `noise_shares`.
    - `squares`: the sum of the second ones. The sum of the third is `window_seen`'s
      ``workers``.
    """
    return (
        weight,
        squares / where(weight > 0, weight, 0 * weight + 1),
        noise[2],
        noise[3],
    )


def forget_window(noise: NoiseFields) -> NoiseFields:
    """Return the noise after a discard: only the running means stay.

    Where other workers resume a window, all that its sum holds then counts as the first
    micro-batch.
    """
    return 0 * noise[0], 0 * noise[0], noise[2], noise[3]


def noise_scale(noise: NoiseFields, where: Where) -> Scalar:
    """Return tr(Sigma) / |G|^2 in items; inf if the gradient cannot be told from noise,
    NaN before any window was measured.
    """
    _, _, trace, square = noise
    one = 0 * trace + 1
    ratio = where(trace > 0, trace, 0 * one) / where(square > 0, square, one)
    known = where(square > 0, ratio, float("inf") + one)
    return where((trace == 0) & (square == 0), float("nan") + one, known)


def _in_range(square: Scalar) -> Scalar:
    return (square > SMALLEST) & (square < LARGEST)


# The batch that an update is made of, and the learning rate that goes with it.


Rule = Literal["linear", "sqrt"]
RULES = ("linear", "sqrt")


def effective_batch_size(per_device: int, steps: int, world_size: int = 1) -> int:
    """Return the items in one update, ``per_device * steps * world_size``.

    Args:
        per_device: items in a micro-batch on one device, an int >= 1.
        steps: micro-batches in a window, an int >= 1.
        world_size: devices that hold different items, an int >= 1.

    Raises:
        ArgumentTypeError, ArgumentValueError: an argument is no such int.
    """
    per_device = require_int("per_device", per_device, at_least=1)
    return (
        per_device
        * require_int("steps", steps, at_least=1)
        * require_int("world_size", world_size, at_least=1)
    )


def scaled_learning_rate(
    base: float, effective: int, reference: int = 256, rule: Rule = "linear"
) -> float:
    """Return the learning rate for a batch of `effective` items, where `base` was right
    for `reference` items.

    Args:
        base: the learning rate for the reference batch, > 0.
        effective: items in one update; see `effective_batch_size`.
        reference: items in one update of the recipe that `base` comes from.
        rule: ``"linear"``: ``base * effective / reference`` (Goyal et al., "Accurate,
            Large Minibatch SGD", 2017, for SGD with a warmup); ``"sqrt"``:
            ``base * sqrt(effective / reference)`` (Krizhevsky, "One weird trick for
            parallelizing convolutional neural networks", 2014), usual for Adam.

    Raises:
        ArgumentTypeError, ArgumentValueError: an argument is not as above.
    """
    base = require_number("base", base, above=0)
    ratio = require_int("effective", effective, at_least=1) / require_int(
        "reference", reference, at_least=1
    )
    return base * (
        ratio if require_choice("rule", rule, RULES) == "linear" else math.sqrt(ratio)
    )
