"""A small regression in float64 that the tests of several neighbours train, and how two
runs of it are compared.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset


class Items(Dataset[dict[str, Tensor]]):
    """`count` items of a regression in the columns ``x``, shape ``(5,)``, and
    ``labels``, shape ``(1,)``.
    """

    def __init__(self, count: int, dtype: torch.dtype = torch.float64) -> None:
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(count, 5, dtype=torch.float64, generator=generator).to(
            dtype
        )
        self.labels = self.x.sum(1, keepdim=True).sin() * 2

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": self.x[index], "labels": self.labels[index]}


class Regressor(nn.Module):
    """The loss of a batch is its mean squared error."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1)).to(
            dtype
        )

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.layers(x)
        return (
            {"logits": logits}
            if labels is None
            else {"loss": (logits - labels).square().mean(), "logits": logits}
        )


def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Of a `Regressor` in whatever it was put into."""
    loss: Tensor = model(**batch)["loss"]
    return loss


def distance(model: nn.Module, expected: nn.Module | Iterable[Tensor]) -> float:
    """The largest difference of two parameters, by the largest parameter."""
    wanted = expected.parameters() if isinstance(expected, nn.Module) else expected
    pairs = [
        (a.detach(), b.detach())
        for a, b in zip(model.parameters(), wanted, strict=True)
    ]
    return max(float((a - b).abs().max()) for a, b in pairs) / max(
        float(b.abs().max()) for _, b in pairs
    )
