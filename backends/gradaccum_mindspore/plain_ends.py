"""Whether a window's end in compiled code may be without a decision: no branch, the update is made.

With ``on_overflow="ignore"`` and no limit nothing is measured. What is left to decide is whether the weight is above 0, no weight was
bad and the divisor is in range. All that is certain where no micro-batch is given a weight: each weighs 1.

But the program is compiled once, and another one may give weights to micro-batches of the same window. So each accumulation keeps a
note of what was compiled. Weights that come first keep the decision; weights that come later are refused, because the compiled end would
not look at them. These functions run while MindSpore compiles, and in Python.
"""

from __future__ import annotations

from itertools import count

from mindspore.ops import constexpr

from gradaccum import UsageError
from gradaccum.kit import explain

LARGEST_WEIGHT = 2.0**40
SMALLEST_SCALE, LARGEST_SCALE = 2.0**-60, 2.0**60
"""Within these a window's divisor is in float32's range."""

SMALLEST_WEIGHT = 2.0**-40
"""With such weights and scales a window's divisor is in range too."""

keys = count(1)
_plain: set[int] = set()
_weighted: set[int] = set()


def weigh(key: int) -> None:
    """Note that a micro-batch of the accumulation `key` may have a bad or a huge weight.

    Raises:
        UsageError: an end without a decision is compiled.
    """
    if key in _plain:
        raise explain(
            UsageError,
            "weight",
            expected='a weight in every micro-batch or in none, because with on_overflow="ignore" a compiled end of windows looks at none',
            found="a program that gives weights after one without was compiled",
            fix="Write optimizer(gradients, weight) everywhere, with Tensor(1.0) as the weight of one item.",
        )
    _weighted.add(key)


@constexpr  # type: ignore[untyped-decorator]
def is_certain(weight: float | None) -> bool:
    """Whether a weight is a constant of the program, else None, and leaves nothing to be decided about its micro-batch."""
    return weight is not None and bool(SMALLEST_WEIGHT <= weight <= LARGEST_WEIGHT)


@constexpr(reuse_result=False)  # type: ignore[untyped-decorator]
def compiled_weigh(key: int) -> bool:
    """`weigh`, while compiling."""
    weigh(key)
    return True


@constexpr(reuse_result=False)  # type: ignore[untyped-decorator]
def compiled_ends_plainly(key: int) -> bool:
    """Whether the end that is being compiled may be without a decision; from now on it is."""
    if key in _weighted:
        return False
    _plain.add(key)
    return True
