"""The two axes along which a micro-batch's cost must stay flat: micro-batches per
window, and tensors of a model.
"""

from __future__ import annotations

RUN = 256
"""Micro-batches in one run, whatever the window's length: windows of 256 are one,
windows of 1 are 256 updates.
"""
WINDOWS = (1, 4, 16, 64, 256)
QUICK_WINDOWS = (16, 64)
STEPS = 4
"""The window's length where the number of tensors is the question."""
TENSORS = (10, 100, 1000, 10_000)
COMPILED_TENSORS = TENSORS[:3]
"""Where a compiler sees each of them, which ends it."""
FEW = 10
"""Tensors where the window's length is the question."""
SMALL = 100_000
"""Elements in all then: few, so that calls and not memory are what is seen."""
LARGE = 1_000_000
"""Elements in all where the number of tensors is the question: the same work cut into
ever more pieces.
"""


def sizes(tensors: int, elements: int) -> list[int]:
    """Elements of each tensor: equal, and `elements` together."""
    size, left_over = divmod(elements, tensors)
    if left_over:
        raise ValueError(
            f"elements: expected a multiple of {tensors} tensors; got {elements}."
        )
    return [size] * tensors


def in_words(tensors: int, elements: int) -> str:
    """Such as ``"100 tensors of 10,000"``."""
    return f"{tensors:,} tensors of {elements // tensors:,}"
