"""Helpers for torch's large batches: a model in float64 with its data, and one backward
pass of the large batch.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

ITEMS = 10
X = torch.randn(
    ITEMS, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
)
Y = torch.arange(ITEMS) % 3
cross_entropy = nn.functional.cross_entropy


def make_model(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).to(dtype)


class Drifting(nn.Module):
    """Its output depends on a buffer that each call replaces. Another buffer is empty
    until the first call.
    """

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("inputs", torch.zeros(0))

    def forward(self, x: Tensor) -> Tensor:
        self.calls = self.calls + 1
        self.inputs.resize_(x.shape).copy_(x.detach())
        return x * self.calls


def truth(model: nn.Module, loss: Callable[[], Tensor]) -> tuple[Tensor, list[Tensor]]:
    """The loss and the gradients of one backward pass of the large batch, in the
    model's dtype.
    """
    value = loss()
    return value.detach(), list(torch.autograd.grad(value, list(model.parameters())))


def gradients(model: nn.Module) -> list[Tensor | None]:
    return [p.grad for p in model.parameters()]


def assert_close(
    model: nn.Module, expected: list[Tensor], bound: float = 1e-13
) -> None:
    for p, q in zip(model.parameters(), expected, strict=True):
        assert p.grad is not None
        assert float((p.grad - q).abs().max()) <= bound * float(q.abs().max())
