"""The shape that the transformer questions train, and what its training costs in
floating-point operations.
"""

from __future__ import annotations

from typing import NamedTuple

STEPS = 8


class Shape(NamedTuple):
    """A decoder: `layers` blocks of attention and an MLP four times as wide, learned
    positions, output tied to the embedding.
    """

    layers: int
    width: int
    heads: int
    vocabulary: int
    length: int
    """Tokens in a sequence."""
    sequences: int
    """Sequences in a micro-batch."""

    @property
    def tokens(self) -> int:
        """Tokens in a window."""
        return STEPS * self.sequences * self.length

    @property
    def window_flops(self) -> float:
        """Of a window, forward and backward.

        Per token 6 operations for each weight of a matrix product and 12 x layers x
        width x length for the attention's own products (Chowdhery et al., "PaLM", 2022,
        appendix B; nothing is taken off for the causal mask).
        """
        weights = 12 * self.layers * self.width**2 + self.vocabulary * self.width
        return (
            6.0 * weights + 12.0 * self.layers * self.width * self.length
        ) * self.tokens


GPT2_SMALL = Shape(
    layers=12, width=768, heads=12, vocabulary=50304, length=1024, sequences=8
)
"""Radford et al., "Language Models are Unsupervised Multitask Learners", 2019; the
vocabulary rounded up to a multiple of 128.
"""

TINY = Shape(layers=2, width=32, heads=2, vocabulary=128, length=16, sequences=2)
"""For a machine without a GPU: that it runs, not how fast."""

DENSE_BF16_FLOPS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12}
"""Peak operations per second of dense bfloat16 matrix products, by a part of the
device's name (the vendor's data sheets).
"""


def rates(shape: Shape, device: str) -> dict[str, float]:
    """What one window is worth: divided by its seconds, tokens per second and, where
    the device's peak is known, its utilization (MFU).
    """
    peak = next(
        (flops for name, flops in DENSE_BF16_FLOPS.items() if name in device), None
    )
    return {"tokens/s": float(shape.tokens)} | (
        {"MFU": shape.window_flops / peak} if peak else {}
    )
