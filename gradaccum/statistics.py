"""Numbers that go with an update: the window's loss, and the learning rate for a larger
batch.

Losses of micro-batches are combined as their gradients are. The functions are
transitions, as in `gradaccum.transitions`, with the same ``options`` and ``where``. A
loss that was not passed is NaN, and makes the window's loss NaN.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

from gradaccum.errors import require_int, require_number
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
    """Return the sum of the open window's losses after a micro-batch. A micro-batch
    adds nothing if it is dropped or has weight 0.

    - `total`: the sum before the micro-batch, 0 at the window's start.
    - `loss`: the micro-batch's loss, a scalar, not scaled; NaN if no loss was passed.
    - `weight`: the micro-batch's weight, a scalar.
    - `adds`: bool, the result of `gradaccum.kit.usable`.
    """
    return where(adds, total + contribution(weight, options) * loss, total)


def window_loss(total: Scalar, state: Fields, options: Options, where: Where) -> Scalar:
    """Return the loss of the ending window: a weighted mean, a sum or a mean over
    items, according to `reduction`; NaN for a window of weight 0.

    - `total`: from `add_loss`, summed over all workers that share the window.
    - `state`: the state that `decide` received.
    """
    weight = state[3]
    one = 0 * weight + 1
    loss = (
        total if options.reduction == "sum" else total / where(weight > 0, weight, one)
    )
    # The derivative of NaN times one would be NaN.
    return where(weight > 0, loss, float("nan") + one)


# The number of items in an update, and the learning rate for it.


Rule = Literal["linear", "sqrt"]


def effective_batch_size(per_device: int, steps: int, world_size: int = 1) -> int:
    """Return the items in one update, ``per_device * steps * world_size``.

    Args:
        per_device: items in a micro-batch on one device, an int >= 1.
        steps: micro-batches in a window, an int >= 1.
        world_size: devices that process different items, an int >= 1.
    """
    counts = {"per_device": per_device, "steps": steps, "world_size": world_size}
    for name, count in counts.items():
        require_int(name, count, at_least=1)
    return per_device * steps * world_size


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
    """
    numbers = {"base": base, "effective": effective, "reference": reference}
    for name, number in numbers.items():
        require_number(name, number, above=0)
    ratio = effective / reference
    return base * {"linear": ratio, "sqrt": math.sqrt(ratio)}[rule]
