"""torch: memory and time of one gradient of a BERT-like encoder: the large batch, accumulated, with recomputation, and both.

Memory is what the process grows by, in a process for each (`benchmarks.peak`); it has the gradients and what the matrix products need
beside the activations. The curves have a point for each size of batch. Under a limit, a way ends at its last point below.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

import gradaccum_torch
from benchmarks.case import Case, Curve
from benchmarks.contestants.bert import (
    ACCUMULATE,
    BATCHES,
    BOTH,
    FEW_LAYERS,
    MICRO_BATCH,
    QUICK_BATCHES,
    RECOMPUTE,
    WAYS,
    Encoder,
)
from benchmarks.memory_time import answers
from benchmarks.peak import peak_bytes


def cases(quick: bool) -> Iterator[Case | Curve]:
    sizes = QUICK_BATCHES if quick else BATCHES
    memory = {(way, items): peak_bytes("torch_memory", way, items) / 2**20 for way in WAYS for items in sizes}
    yield from answers("torch", FEW_LAYERS, sizes, window, memory)


def window(way: str, items: int, shape: Encoder = FEW_LAYERS) -> Callable[[], object]:
    """One gradient of a batch of `items` sequences."""
    torch.manual_seed(0)
    blocks: nn.Module = nn.Sequential(*(_block(shape) for _ in range(shape.layers)))
    net = gradaccum_torch.recompute(blocks, segments=shape.layers) if way in (RECOMPUTE, BOTH) else blocks
    x = torch.randn(items, shape.length, shape.width)

    def loss(part: Tensor) -> Tensor:
        return net(part).square().mean()  # type: ignore[no-any-return]

    def whole() -> None:
        blocks.zero_grad()
        loss(x).backward()  # type: ignore[no-untyped-call]

    def accumulated() -> None:
        blocks.zero_grad()
        gradaccum_torch.backward(loss, x, micro_batch_size=MICRO_BATCH)

    return accumulated if way in (ACCUMULATE, BOTH) else whole


def _block(shape: Encoder) -> nn.Module:
    return nn.TransformerEncoderLayer(shape.width, shape.heads, 4 * shape.width, dropout=0.1, activation="gelu", batch_first=True)
