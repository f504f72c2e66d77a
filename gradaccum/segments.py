"""Where a chain of layers is cut for recomputation: the rule, its default and its errors, alike in every backend.

With s segments of a chain of n layers, a step keeps the inputs of the s segments and, at any one time, the activations of the n / s layers
that are being recomputed. The sum s + n / s is least at s = sqrt(n): Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016.
"""

from __future__ import annotations

import itertools
import math

from gradaccum._validation import require_int
from gradaccum.errors import ArgumentValueError, explain
from gradaccum.splitting import Cut


def segment_cuts(depth: int, segments: object = None) -> list[Cut]:
    """The layers of each segment, in order; the first segments have one layer more where the depth does not divide.

    Args:
        depth: how many layers the chain has.
        segments: an int from 1 to `depth`; None takes sqrt(depth), rounded.

    Raises:
        ArgumentTypeError: `segments` is no int.
        ArgumentValueError: the chain is empty, or `segments` is below 1 or above `depth`.
    """
    if depth < 1:
        fix = "Pass the layers in the order in which they run."
        raise explain(ArgumentValueError, "recompute", expected="at least one layer", found="an empty chain", fix=fix)
    number = max(1, round(math.sqrt(depth))) if segments is None else require_int("segments", segments, at_least=1)
    if number > depth:
        fix = f"Write segments={max(1, round(math.sqrt(depth)))}, about the square root of the depth, or leave it out."
        raise explain(ArgumentValueError, "segments", expected=f"at most {depth}, the number of layers", got=number, fix=fix)
    short, longer = divmod(depth, number)
    starts = [index * short + min(index, longer) for index in range(number + 1)]
    return [Cut(start, stop) for start, stop in itertools.pairwise(starts)]
