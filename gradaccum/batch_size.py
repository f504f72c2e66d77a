"""The batch that an update is made of, and the learning rate that goes with it."""

from __future__ import annotations

import math
from typing import Literal

from gradaccum._validation import require_choice, require_int, require_number

Rule = Literal["linear", "sqrt"]
RULES = ("linear", "sqrt")


def effective_batch_size(per_device: int, steps: int, world_size: int = 1) -> int:
    """Items in one update: ``per_device * steps * world_size``.

    Args:
        per_device: items in a micro-batch on one device, an int >= 1.
        steps: micro-batches in a window, an int >= 1.
        world_size: devices that hold different items, an int >= 1.

    Raises:
        ArgumentTypeError, ArgumentValueError: an argument is no such int.
    """
    per_device = require_int("per_device", per_device, at_least=1)
    return per_device * require_int("steps", steps, at_least=1) * require_int("world_size", world_size, at_least=1)


def scaled_learning_rate(base: float, effective: int, reference: int = 256, rule: Rule = "linear") -> float:
    """The learning rate for a batch of `effective` items, where `base` was right for one of `reference`.

    Args:
        base: the learning rate for the reference batch, > 0.
        effective: items in one update; see `effective_batch_size`.
        reference: items in one update of the recipe that `base` comes from. 256 is that of Goyal et al.
        rule: ``"linear"``: ``base * effective / reference`` (Goyal et al., "Accurate, Large Minibatch SGD", 2017, section 2.1, for SGD with
            a warmup); ``"sqrt"``: ``base * sqrt(effective / reference)``, which keeps the variance of an update (Krizhevsky, "One weird
            trick for parallelizing convolutional neural networks", 2014, section 5), usual for Adam.

    Raises:
        ArgumentTypeError, ArgumentValueError: an argument is not as above.
    """
    base = require_number("base", base, above=0)
    ratio = require_int("effective", effective, at_least=1) / require_int("reference", reference, at_least=1)
    return base * (ratio if require_choice("rule", rule, RULES) == "linear" else math.sqrt(ratio))
