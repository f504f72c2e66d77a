"""The shape that the questions about memory train, and their four ways to make one
gradient.
"""

from __future__ import annotations

from typing import NamedTuple


class Encoder(NamedTuple):
    """Blocks of attention and an MLP four times as wide, as in BERT-base (Devlin et al.
    2019), which has 12.
    """

    layers: int
    width: int
    heads: int
    length: int
    """Tokens in a sequence."""


BERT_BASE = Encoder(layers=12, width=768, heads=12, length=128)
FEW_LAYERS = BERT_BASE._replace(layers=4)
"""For the curves, which take many runs. The gradients of a layer need about what its
activations of 3 sequences do, whatever the depth.
"""
TINY = Encoder(layers=4, width=64, heads=2, length=32)

LARGE, ACCUMULATE, RECOMPUTE, BOTH = (
    "large batch",
    "accumulate",
    "recompute",
    "accumulate and recompute",
)
WAYS = (LARGE, ACCUMULATE, RECOMPUTE, BOTH)
MICRO_BATCH = 2
"""Sequences in a micro-batch, whatever the batch."""
BATCHES = (2, 4, 8, 16)
QUICK_BATCHES = (2, 4)
