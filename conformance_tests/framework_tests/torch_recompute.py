"""A model with everything that a second run could disturb, and the ways to recompute
it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from gradaccum_torch.recomputation import recompute


class Average(nn.Module):
    """Normalises by an average that its forward pass reads, and then moves: in place,
    or to another tensor.
    """

    def __init__(self, width: int = 8, inplace: bool = True) -> None:
        super().__init__()
        self.inplace = inplace
        self.register_buffer("mean", torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        out = torch.tanh(x - self.mean)
        moved = 0.5 * self.mean + 0.5 * x.detach().mean(0)
        self.mean = self.mean.copy_(moved) if self.inplace else moved
        return out


class Noise(nn.Module):
    """Draws its own numbers, not in place."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.bernoulli(torch.full_like(x, 0.5))


def make(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [
        nn.Linear(8, 8),
        nn.Dropout(),
        nn.BatchNorm1d(8),
        nn.Tanh(),
        Average(),
        nn.Linear(8, 8),
        Noise(),
        nn.BatchNorm1d(8),
    ]
    return nn.Sequential(
        *layers, nn.Dropout(0.3), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 2)
    ).to(dtype)


def data(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.linspace(-1, 2, 40, dtype=torch.float64).reshape(5, 8).sin().to(dtype)


def state(model: nn.Module) -> list[Tensor]:
    """Gradients, buffers and the place in the random numbers."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return [*gradients, *model.buffers(), torch.get_rng_state()]


def trained(
    model: nn.Module,
    call: Callable[[Tensor], Tensor] | None = None,
    x: Tensor | None = None,
) -> list[Tensor]:
    torch.manual_seed(1)
    (call or model)(
        data(next(model.parameters()).dtype) if x is None else x
    ).float().square().sum().backward()
    return state(model)


def same(got: list[Tensor], expected: list[Tensor]) -> bool:
    return len(got) == len(expected) and all(map(torch.equal, got, expected))


WAYS: dict[str, dict[str, Any]] = {
    "default": {},
    "one segment": {"segments": 1},
    "each layer": {"segments": 12},
    "five": {"segments": 5},
    "by name": {"submodules": ["0", "1", "2", "4", "8"]},
    "by module": {"submodules": "children"},
}


def recomputed(way: str, model: nn.Sequential) -> nn.Module:
    options = dict(WAYS[way])
    if options.get("submodules") == "children":
        options["submodules"] = model.children()
    return recompute(model, **options)


def kept_bytes(model: nn.Module) -> int:
    """What autograd keeps of a forward pass, apart from parameters."""
    own, kept = {p.data_ptr() for p in model.parameters()}, {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(torch.ones(64, 8))
    return sum(
        tensor.untyped_storage().nbytes()
        for address, tensor in kept.items()
        if address not in own
    )
