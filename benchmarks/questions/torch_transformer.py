"""torch: a transformer of GPT-2-small shape in bfloat16 on a GPU, in tokens per second;
on a CPU a tiny one, to see that it runs.

Two cases: float32 parameters under autocast, as the usual recipes have it, and bfloat16
parameters, which by hand are summed and updated in bfloat16; ours are summed in float32
and have float32 masters, so that there the ratio is what those cost.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from benchmarks.case import Case
from benchmarks.contestants.torch_loops import (
    BASELINE,
    CUDA,
    DEVICE,
    Loss,
    Recipe,
    Window,
    hand_written,
    recipes,
    wrapped,
)
from benchmarks.contestants.transformer import GPT2_SMALL, TINY, Shape, rates


class Decoder(nn.Module):
    """Logits of the next token."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.positions = nn.Embedding(shape.length, shape.width)
        block = nn.TransformerEncoderLayer(
            shape.width,
            shape.heads,
            4 * shape.width,
            dropout=0.0,
            activation="gelu",
            batch_first=True,
            norm_first=True,
        )
        self.blocks = nn.TransformerEncoder(
            block, shape.layers, nn.LayerNorm(shape.width), enable_nested_tensor=False
        )
        self.register_buffer(
            "mask", nn.Transformer.generate_square_subsequent_mask(shape.length)
        )

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions.weight
        x = self.blocks(x, mask=self.mask.to(x.dtype), is_causal=True)
        return nn.functional.linear(x, self.tokens.weight)


def cases(quick: bool) -> Iterator[Case]:
    shape = GPT2_SMALL if CUDA and not quick else TINY
    ids = torch.randint(
        shape.vocabulary, (shape.sequences, shape.length), device=DEVICE
    )
    name = f"{shape.layers} x {shape.width}, {shape.length} tokens x {shape.sequences}"
    yield _case(f"{name}, autocast", shape, ids, torch.float32, recipes())
    yield _case(
        f"{name}, bfloat16 parameters",
        shape,
        ids,
        torch.bfloat16,
        {BASELINE: hand_written, "gradaccum": _with_masters},
    )


def _case(
    name: str,
    shape: Shape,
    ids: Tensor,
    dtype: torch.dtype,
    recipes: Mapping[str, Recipe],
) -> Case:
    windows, counts = dict[str, Window](), dict[str, dict[str, float]]()
    for contestant, recipe in recipes.items():
        held = _reset_peak()
        windows[contestant] = recipe(
            *_fresh(shape, dtype), lambda model: _loss(model, ids)
        )
        windows[contestant]()
        counts[contestant] = (
            {"peak GiB": (torch.cuda.max_memory_allocated() - held) / 2**30}
            if CUDA
            else {}
        )
    device = torch.cuda.get_device_name() if CUDA else "CPU"
    return Case(
        name,
        BASELINE,
        windows,
        counts,
        rates=dict.fromkeys(windows, rates(shape, device)),
    )


def _reset_peak() -> int:
    if not CUDA:
        return 0
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def _fresh(shape: Shape, dtype: torch.dtype) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Decoder(shape).to(DEVICE, dtype)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def _loss(model: nn.Module, ids: Tensor) -> Tensor:
    with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
        logits = model(ids)
    return nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten()
    )


def _with_masters(model: nn.Module, inner: torch.optim.Optimizer, loss: Loss) -> Window:
    return wrapped(model, inner, loss, master_weights=True)
