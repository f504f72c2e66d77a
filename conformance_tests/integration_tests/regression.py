"""A small regression in float64 that the tests of torch's neighbours train, and how two
runs of it are compared.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset


def rows(count: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count, 5, dtype=torch.float64, generator=generator)
    return x, x.sum(dim=1, keepdim=True).sin() * 2


X, Y = rows(40)


def make_net(bias: bool = True) -> nn.Module:
    torch.manual_seed(0)
    layers = (nn.Linear(5, 4, bias=bias), nn.Tanh(), nn.Linear(4, 1, bias=bias))
    return nn.Sequential(*layers).double()


def mean_square(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return (net(x) - y).square().mean()


class Items(Dataset[dict[str, Tensor]]):
    """So many rows, in the columns ``x`` and ``labels``."""

    def __init__(self, count: int, dtype: torch.dtype = torch.float64) -> None:
        x, labels = rows(count)
        self.x = x.to(dtype)
        self.labels = labels.to(dtype)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": self.x[index], "labels": self.labels[index]}


class Regressor(nn.Module):
    """The loss of a batch is its mean squared error."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.layers = make_net().to(dtype)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.layers(x)
        return {"loss": (logits - labels).square().mean(), "logits": logits}


def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Of a `Regressor` in whatever it was put into."""
    loss: Tensor = model(**batch)["loss"]
    return loss


def distance(model: nn.Module, expected: nn.Module | Iterable[Tensor]) -> float:
    """The largest difference of two parameters, by the largest parameter."""
    wanted = expected.parameters() if isinstance(expected, nn.Module) else expected
    pairs = list(zip(model.parameters(), wanted, strict=True))
    with torch.no_grad():
        largest = max(float(b.abs().max()) for _, b in pairs)
        return max(float((a - b).abs().max()) for a, b in pairs) / largest
