"""The gradient noise scale: how large a batch is still worth it, from the gradients that a window sums anyway.

The noise scale is tr(Sigma) / |G|^2, in items: Sigma is the covariance of one item's gradient, G the true gradient. Batches far below it
are noise, and batches far above it repeat themselves (McCandlish et al., "An Empirical Model of Large-Batch Training", 2018, equation 2.8).

Two squared norms of batches of different size tell both parts (there, appendix A.1): that of a mean gradient of w items is
|G|^2 + tr(Sigma) / w on average. The small batch is the window's first micro-batch, and the large one is the window. So a window costs one
norm more and no second buffer. The quotient of two averages is not the average of quotients, so both parts have running means. These begin
at 0, which cancels in the quotient. Each function is a transition in the sense of `gradaccum.transitions`: it has one source everywhere.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from gradaccum.options import DECAY
from gradaccum.state import Scalar

if TYPE_CHECKING:
    from gradaccum.options import Options
    from gradaccum.transitions import Fields, Where

SMALLEST, LARGEST = 2.0**-100, 2.0**100
"""Squared norms beyond these, and what is computed from them, may leave float32's range. A window that has such a one is left out."""

NoiseFields = tuple[Scalar, Scalar, Scalar, Scalar]
"""A `Noise` as a plain tuple, for the same reason as `gradaccum.transitions.Fields`."""


class Noise(NamedTuple):
    """What is known of the noise. Every field is a scalar of the dtype of `State.weight`."""

    first_weight: Scalar
    """Weight of the open window's first micro-batch that added to the sum; 0 before it."""
    first_square: Scalar
    """Squared 2-norm of that micro-batch's mean gradient, unscaled."""
    trace: Scalar
    """Running mean of the estimates of tr(Sigma)."""
    square: Scalar
    """Running mean of the estimates of |G|^2."""


def no_noise() -> Noise:
    """Before the first micro-batch, in Python numbers."""
    return Noise(0.0, 0.0, 0.0, 0.0)


def is_first(noise: NoiseFields, state: Fields) -> Scalar:
    """bool: the micro-batch that was counted last is the first of its window to have added something, so its norm is to be measured.

    Args:
        noise: as before it.
        state: the state after it.
    """
    return (noise[0] == 0) & (state[3] > 0)


def first_seen(noise: NoiseFields, state: Fields, norm: Scalar, where: Where) -> NoiseFields:
    """The noise after the micro-batch for which `is_first` holds.

    Args:
        noise: as before it.
        state: the state after it.
        norm: 2-norm of the sum, which holds this micro-batch alone, as it is: weighted and scaled.
        where: the backend's `Where`.
    """
    first, weight, loss_scale = is_first(noise, state), state[3], state[5]
    one = 0 * weight + 1
    mean = norm / (where(first, weight, one) * loss_scale)
    return where(first, weight, noise[0]), where(first, mean * mean, noise[1]), noise[2], noise[3]


def window_seen(noise: NoiseFields, state: Fields, grad_norm: Scalar, options: Options, where: Where, workers: Scalar = 1) -> NoiseFields:
    """The noise after a window: the running means moved, unless the window tells nothing; the next window has no first micro-batch yet.

    A window of one micro-batch tells nothing, nor does one whose gradient is not finite.

    Args:
        noise: with the first micro-batch; `joined_noise`, if several workers share the window.
        state: the state that was decided on, of all workers.
        grad_norm: `Decision.grad_norm`.
        options: the validated options.
        where: the backend's `Where`.
        workers: how many of them had a first micro-batch.
    """
    small, first_square, trace, square = noise
    large = state[3]
    one = 0 * large + 1
    mean = grad_norm / where(large > 0, large, one) if options.reduction == "sum" else grad_norm
    whole_square = mean * mean
    more = workers * large - small
    tells = (small > 0) & (more > 0) & _in_range(first_square) & _in_range(whole_square)
    more = where(tells, more, one)
    first, whole = where(tells, first_square, one), where(tells, whole_square, one)
    # With n first micro-batches of b items in all, of B: b s + n tr = their sum, B s + tr = the window's.
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
    """What the workers of a window add up of their own first micro-batches: weight, weighted square, and how many have one.

    Args:
        noise: one worker's.
        where: the backend's `Where`.
    """
    weight, square, _, _ = noise
    has_one, zero = weight > 0, 0 * weight
    return weight, where(has_one, weight * square, zero), where(has_one, zero + 1, zero)


def joined_noise(noise: NoiseFields, weight: Scalar, squares: Scalar, where: Where) -> NoiseFields:
    """The noise of a window that several workers share, for `window_seen`.

    Args:
        noise: one worker's.
        weight: the sum of the first of their `noise_shares`.
        squares: the sum of the second. That of the third is `window_seen`'s ``workers``.
        where: the backend's `Where`.
    """
    return weight, squares / where(weight > 0, weight, 0 * weight + 1), noise[2], noise[3]


def forget_window(noise: NoiseFields) -> NoiseFields:
    """The noise after a discard: the means as they were.

    Also that of a window which other workers go on with: the next micro-batch then counts as the first, with all that the sum holds. Any
    part of a window would do as well as its first micro-batch.
    """
    return 0 * noise[0], 0 * noise[0], noise[2], noise[3]


def noise_scale(noise: NoiseFields, where: Where) -> Scalar:
    """tr(Sigma) / |G|^2 in items; inf where the gradient cannot be told from noise, NaN before any window told something."""
    _, _, trace, square = noise
    one = 0 * trace + 1
    ratio = where(trace > 0, trace, 0 * one) / where(square > 0, square, one)
    known = where(square > 0, ratio, float("inf") + one)
    return where((trace == 0) & (square == 0), float("nan") + one, known)


def _in_range(square: Scalar) -> Scalar:
    return (square > SMALLEST) & (square < LARGEST)
