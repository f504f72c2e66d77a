"""The loss of a window, the number of items in an update, and the learning rate for a
larger batch.

The losses of micro-batches are combined in the same way as their gradients. `add_loss`
and `window_loss` accept the same ``options`` and ``where`` arguments as the functions
in `gradaccum.transitions`, and can likewise be compiled. A loss that was not passed is
represented by NaN, which makes the window's loss NaN.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

from gradaccum.errors import require_int, require_number
from gradaccum.state import Scalar
from gradaccum.transitions import contribution, denominator

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
    """Return the sum of the open window's losses after one more micro-batch. A
    micro-batch adds nothing if it is dropped or has weight 0.

    - `total`: the sum before the micro-batch, 0 at the window's start.
    - `loss`: the micro-batch's unscaled loss, a scalar; NaN if no loss was passed.
    - `weight`: the micro-batch's weight, a scalar.
    - `adds`: bool, the result of `gradaccum.kit.usable`: True if the micro-batch
      counts.
    """
    return where(adds, total + contribution(weight, options) * loss, total)


def window_loss(total: Scalar, state: Fields, options: Options, where: Where) -> Scalar:
    """Return the loss of a window at its end. Depending on `reduction`, the result is a
    weighted mean, a sum or a mean over items. It is NaN for a window of weight 0.

    - `total`: the result of `add_loss`, summed over all workers that share the window.
    - `state`: the state that was passed to `decide`.
    """
    weight = state[3]
    loss = total / denominator(weight, options, where)
    # Do not multiply by NaN, because the derivative would be NaN.
    return where(weight > 0, loss, float("nan") + 0 * weight)


# The number of items in an update, and a learning rate that matches this number.


Rule = Literal["linear", "sqrt"]


def effective_batch_size(per_device: int, steps: int, world_size: int = 1) -> int:
    """Return the number of items in one update, ``per_device * steps * world_size``.

    Args:
        per_device: the number of items in a micro-batch on one device, an int >= 1.
        steps: the number of micro-batches in a window, an int >= 1.
        world_size: the number of devices that process different items, an int >= 1.
    """
    counts = {"per_device": per_device, "steps": steps, "world_size": world_size}
    for name, count in counts.items():
        require_int(name, count, at_least=1)
    return per_device * steps * world_size


def scaled_learning_rate(
    base: float, effective: int, reference: int = 256, rule: Rule = "linear"
) -> float:
    """Return the learning rate for a batch of `effective` items, given that `base` is
    the right learning rate for `reference` items.

    Args:
        base: the learning rate for the reference batch, > 0.
        effective: the number of items in one update; see `effective_batch_size`.
        reference: the number of items in one update in the training recipe that uses
            `base`.
        rule: ``"linear"`` returns ``base * effective / reference`` (Goyal et al.,
            "Accurate, Large Minibatch SGD", 2017, for SGD with a warmup). ``"sqrt"``
            returns ``base * sqrt(effective / reference)`` (Krizhevsky, "One weird trick
            for parallelizing convolutional neural networks", 2014), which is usual for
            Adam.
    """
    numbers = {"base": base, "effective": effective, "reference": reference}
    for name, number in numbers.items():
        require_number(name, number)
    ratio = effective / reference
    return base * {"linear": ratio, "sqrt": math.sqrt(ratio)}[rule]
