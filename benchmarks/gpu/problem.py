"""The problem of torch's checks: a small network and items, the same each time; the
bare large batch; and the distance between two models.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.gpu.records import Setting

STEPS = 4
"""Micro-batches in a window."""
FLOAT64_BOUND = 1e-12

MicroBatch = tuple[Tensor, Tensor]


def make_model(setting: Setting, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    width = setting.size(16, 256)
    torch.manual_seed(1)
    layers = [nn.Linear(width, 2 * width), nn.Tanh(), nn.Linear(2 * width, width)]
    return nn.Sequential(*layers).to(setting.device, dtype)


def make_items(
    setting: Setting, items: int, dtype: torch.dtype = torch.float64
) -> MicroBatch:
    """Return inputs and targets, each of shape ``(items, width)``."""
    width = setting.size(16, 256)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(items, width, generator=generator, dtype=torch.float64)
    y = torch.randn(items, width, generator=generator, dtype=torch.float64)
    return x.to(setting.device, dtype), y.to(setting.device, dtype)


def cut(items: MicroBatch, sizes: Sequence[int]) -> list[MicroBatch]:
    """Return consecutive micro-batches of these sizes."""
    inputs, targets = (each.split(list(sizes)) for each in items)  # type: ignore[no-untyped-call]
    return list(zip(inputs, targets, strict=True))


def joined(micro_batches: Iterable[MicroBatch]) -> MicroBatch:
    """Return the micro-batches as one batch."""
    inputs, targets = zip(*micro_batches, strict=True)
    return torch.cat(inputs), torch.cat(targets)


def mean_loss(model: Callable[[Tensor], Tensor], x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.mse_loss(model(x), y)


def inner_optimizer(
    model: nn.Module, learning_rate: float = 1e-2
) -> torch.optim.Optimizer:
    """Return AdamW with an `eps` that does not magnify the rounding of a gradient near
    0.
    """
    return torch.optim.AdamW(model.parameters(), lr=learning_rate, eps=1e-3)


def train_large(
    model: nn.Module, batches: Iterable[MicroBatch], clip_norm: float | None = None
) -> None:
    """Apply one update of the bare optimizer for each of the large batches."""
    optimizer = inner_optimizer(model)
    for x, y in batches:
        backward(mean_loss(model, x, y))
        if clip_norm is not None:
            clip(gradients_of(model), clip_norm)
        optimizer.step()
        optimizer.zero_grad()


def clip(gradients: Sequence[Tensor], limit: float) -> None:
    """Clip to a norm of `limit` exactly; `clip_grad_norm_` divides by the norm plus
    1e-6.
    """
    norm = flat(gradients).norm()
    for gradient in gradients:
        gradient.mul_((limit / norm).clamp(max=1.0))


def train(
    model: Callable[[Tensor], Tensor], opt: Any, micro_batches: Iterable[MicroBatch]
) -> None:
    """Train with a wrapped optimizer; a micro-batch's weight is its items."""
    for x, y in micro_batches:
        opt.backward(mean_loss(model, x, y), weight=len(x))
        opt.step()
        opt.zero_grad()


def backward(loss: Tensor) -> None:
    loss.backward()  # type: ignore[no-untyped-call]


def flat(tensors: Iterable[Tensor]) -> Tensor:
    """Return all elements as one float64 vector."""
    return torch.cat([tensor.detach().double().flatten() for tensor in tensors])


def distance(model: nn.Module, large: nn.Module, start: nn.Module) -> float:
    """Return how far a model ended from the large batch's, relative to how far that one
    moved from the start.
    """
    ended = flat(model.parameters())
    expected = flat(large.parameters())
    moved = (expected - flat(start.parameters())).norm()
    return float((ended - expected).norm() / moved)


def gradient_distance(model: nn.Module, large: nn.Module) -> float:
    """Return how far ``.grad`` is from the large batch's, relative to its length."""
    got = flat(gradients_of(model))
    expected = flat(gradients_of(large))
    return float((got - expected).norm() / expected.norm())


def gradients_of(model: nn.Module) -> list[Tensor]:
    return [each.grad for each in model.parameters() if each.grad is not None]


def have_equal_bits(model: nn.Module, other: nn.Module) -> bool:
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def synchronize(setting: Setting) -> None:
    if setting.device == "cuda":
        torch.cuda.synchronize()


def seconds_of(setting: Setting, action: Callable[[], object], repeats: int) -> float:
    """Return the seconds of one `action`, the mean of `repeats` after three."""
    for _ in range(3):
        action()
    synchronize(setting)
    begin = time.perf_counter()
    for _ in range(repeats):
        action()
    synchronize(setting)
    return (time.perf_counter() - begin) / repeats
