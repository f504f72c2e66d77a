"""torch: a transformer of GPT-2-small shape in bfloat16 on a GPU, in tokens per second; on a CPU a tiny one, to see that it runs.

Two cases: float32 parameters under autocast, as the usual recipes have it, and bfloat16 parameters, which by hand are summed and updated
in bfloat16; ours are summed in float32 and have float32 masters, so that there the ratio is what those cost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

import gradaccum
from benchmarks.case import Case
from benchmarks.transformer import GPT2_SMALL, STEPS, TINY, Shape, rates

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
BASELINE = "hand-written loop"

Window = Callable[[], object]
Recipe = Callable[[nn.Module, torch.optim.Optimizer, Tensor], Window]


class Decoder(nn.Module):
    """Logits of the next token."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.positions = nn.Embedding(shape.length, shape.width)
        block = nn.TransformerEncoderLayer(
            shape.width, shape.heads, 4 * shape.width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(block, shape.layers, nn.LayerNorm(shape.width), enable_nested_tensor=False)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(shape.length))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions.weight
        x = self.blocks(x, mask=self.mask.to(x.dtype), is_causal=True)
        return nn.functional.linear(x, self.tokens.weight)


def cases(quick: bool) -> Iterator[Case]:
    shape = GPT2_SMALL if CUDA and not quick else TINY
    ids = torch.randint(shape.vocabulary, (shape.sequences, shape.length), device=DEVICE)
    name = f"{shape.layers} x {shape.width}, {shape.length} tokens x {shape.sequences}"
    autocast: dict[str, Recipe] = {BASELINE: _hand_written, "gradaccum": _gradaccum}
    autocast |= {"Accelerate": _accelerate} if find_spec("accelerate") else {}
    autocast |= {"Fabric": _fabric} if find_spec("lightning_fabric") else {}
    yield _case(f"{name}, autocast", shape, ids, torch.float32, autocast)
    yield _case(f"{name}, bfloat16 parameters", shape, ids, torch.bfloat16, {BASELINE: _hand_written, "gradaccum": _with_masters})


def _case(name: str, shape: Shape, ids: Tensor, dtype: torch.dtype, recipes: dict[str, Recipe]) -> Case:
    windows, counts = dict[str, Window](), dict[str, dict[str, float]]()
    for contestant, recipe in recipes.items():
        held = _reset_peak()
        windows[contestant] = recipe(*_fresh(shape, dtype), ids)
        windows[contestant]()
        counts[contestant] = {"peak GiB": (torch.cuda.max_memory_allocated() - held) / 2**30} if CUDA else {}
    device = torch.cuda.get_device_name() if CUDA else "CPU"
    return Case(name, BASELINE, windows, counts, rates=dict.fromkeys(windows, rates(shape, device)))


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
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


def _wait() -> None:
    if CUDA:
        torch.cuda.synchronize()


def _hand_written(model: nn.Module, optimizer: torch.optim.Optimizer, ids: Tensor) -> Window:
    def window() -> None:
        for _ in range(STEPS):
            (_loss(model, ids) / STEPS).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        _wait()

    return window


def _gradaccum(model: nn.Module, inner: torch.optim.Optimizer, ids: Tensor, **options: Any) -> Window:
    optimizer = gradaccum.wrap(inner, steps=STEPS, **options)

    def window() -> None:
        for _ in range(STEPS):
            _loss(model, ids).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
        _wait()

    return window


def _with_masters(model: nn.Module, inner: torch.optim.Optimizer, ids: Tensor) -> Window:
    return _gradaccum(model, inner, ids, master_weights=True)


def _accelerate(model: nn.Module, inner: torch.optim.Optimizer, ids: Tensor) -> Window:
    from accelerate import Accelerator

    accelerator = Accelerator(gradient_accumulation_steps=STEPS, cpu=not CUDA)
    model, optimizer = accelerator.prepare(model, inner)

    def window() -> None:
        for _ in range(STEPS):
            with accelerator.accumulate(model):
                accelerator.backward(_loss(model, ids))
                optimizer.step()
                optimizer.zero_grad()
        _wait()

    return window


def _fabric(model: nn.Module, inner: torch.optim.Optimizer, ids: Tensor) -> Window:
    from lightning_fabric import Fabric

    fabric = Fabric(accelerator=DEVICE.type, devices=1)
    wrapped, optimizer = fabric.setup(model, inner)

    def window() -> None:
        for index in range(STEPS):
            last = index == STEPS - 1
            with fabric.no_backward_sync(wrapped, enabled=not last):
                fabric.backward(_loss(wrapped, ids) / STEPS)
        optimizer.step()
        optimizer.zero_grad()
        _wait()

    return window
