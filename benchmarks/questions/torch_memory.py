"""torch: memory and time of one gradient of a BERT-like encoder: the large batch,
accumulated, with recomputation, and both.

Memory is what the process grows by, in a process for each (`benchmarks.peak`); it has
the gradients and what the matrix products need beside the activations. The curves have
a point for each size of batch. Under a limit, a way ends at its last point below.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint_sequential

import gradaccum_torch
from benchmarks.case import Case, Curve
from benchmarks.contestants.bert import (
    ACCUMULATE,
    BERT_BASE,
    BOTH,
    MICRO_BATCH,
    RECOMPUTE,
    Encoder,
)
from benchmarks.memory_time import answers
from benchmarks.peak import peak_bytes


def cases(quick: bool) -> Iterator[Case | Curve]:
    yield from answers("torch", quick, gradient, peak_of)


def peak_of(way: str, items: int, shape: Encoder) -> float:
    """MiB, of a process that calls `window`."""
    return peak_bytes("torch_memory", way, items, shape.layers) / 2**20


def window(way: str, items: int, layers: int) -> Callable[[], object]:
    """One gradient, through as many layers of BERT-base."""
    return gradient(way, items, BERT_BASE._replace(layers=layers))


def gradient(way: str, items: int, shape: Encoder) -> Callable[[], object]:
    """One gradient of a batch of `items` sequences."""
    torch.manual_seed(0)
    blocks = nn.Sequential(*(_block(shape) for _ in range(shape.layers)))
    net = _Recomputed(blocks) if way in (RECOMPUTE, BOTH) else blocks
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


class _Recomputed(nn.Module):
    """Blocks in segments of a sixth. The last one keeps its activations, which the
    backward pass needs first: to free them saves nothing.
    """

    def __init__(self, blocks: nn.Sequential) -> None:
        super().__init__()
        size = max(1, len(blocks) // 6)
        self.segments = len(blocks) // size - 1
        self.first, self.last = blocks[:-size], blocks[-size:]

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint_sequential(  # type: ignore[no-untyped-call]
            self.first, self.segments, x, use_reentrant=False
        )
        return self.last(x)  # type: ignore[no-any-return]


def _block(shape: Encoder) -> nn.Module:
    return nn.TransformerEncoderLayer(
        shape.width,
        shape.heads,
        4 * shape.width,
        dropout=0.1,
        activation="gelu",
        batch_first=True,
    )
