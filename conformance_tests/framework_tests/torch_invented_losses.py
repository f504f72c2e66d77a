"""Losses as people write them, each in a few lines, and whether they accumulate: the
kind of cause, or "" for a right one. They judge how often `verify` is right.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

ITEMS = 12
TOKENS = 6
WIDTH = 5
CLASSES = 4


class Invented(NamedTuple):
    """One loss."""

    name: str
    kind: str
    loss: Callable[..., Tensor]
    batch: tuple[str, ...]
    """The names of its arrays in `arrays`."""
    options: dict[str, Any]
    layers: tuple[Callable[[], nn.Module], ...]
    """Between the model's two linear layers."""


def arrays() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(ITEMS, *shape, generator=generator)

    lengths = torch.tensor([1, 6, 2, 5, 3, 4, 6, 1, 1, 5, 6, 2])
    mask = (torch.arange(TOKENS) < lengths[:, None]).float()
    labels = torch.randint(0, CLASSES, (ITEMS,), generator=generator)
    token_labels = torch.randint(0, CLASSES, (ITEMS, TOKENS), generator=generator)
    return {
        "x": draw(WIDTH),
        "z": draw(WIDTH),
        "tokens": draw(TOKENS, WIDTH),
        "target": draw(CLASSES),
        "value": draw(),
        "labels": labels,
        "padded": torch.where(mask > 0, token_labels, -100),
        "missing": torch.where(mask[:, 2] > 0, labels, -100),
        "mask": mask,
        "lengths": lengths.float(),
        "binary": torch.tensor([0.0, 1, 1, 0, 1, 0, 0, 0, 1, 0, 0, 0]),
        "importance": torch.tensor([1.0, 3, 2, 5, 1, 1, 4, 2, 1, 6, 1, 3]),
    }


def model_of(layers: tuple[Callable[[], nn.Module], ...]) -> nn.Module:
    torch.manual_seed(0)
    made = [layer() for layer in layers]
    return nn.Sequential(nn.Linear(WIDTH, 8), *made, nn.Tanh(), nn.Linear(8, CLASSES))


LOSSES: list[Invented] = []


def add(
    kind: str,
    batch: str,
    *losses: Callable[..., Tensor],
    layers: tuple[Callable[[], nn.Module], ...] = (),
    **options: Any,
) -> None:
    for loss in losses:
        name = f"{len(LOSSES)} {kind or 'right'} {batch}"
        LOSSES.append(Invented(name, kind, loss, tuple(batch.split()), options, layers))


def normalised(x: Tensor) -> Tensor:
    return F.normalize(x, dim=-1)


def similarity(x: Tensor, z: Tensor) -> Tensor:
    return normalised(x) @ normalised(z).T / 0.5


def places(x: Tensor) -> Tensor:
    return torch.arange(len(x))


# Means over items.

add(
    "",
    "x target",
    lambda m, x, t: F.mse_loss(m(x), t),
    lambda m, x, t: F.l1_loss(m(x), t),
    lambda m, x, t: F.huber_loss(m(x), t, delta=0.3),
    lambda m, x, t: F.smooth_l1_loss(m(x), t),
    lambda m, x, t: (m(x) - t).cosh().log().mean(),
    lambda m, x, t: (0.9 * F.relu(t - m(x)) + 0.1 * F.relu(m(x) - t)).mean(),
    lambda m, x, t: F.kl_div(
        m(x).log_softmax(-1), t.softmax(-1), reduction="batchmean"
    ),
    lambda m, x, t: (1 - F.cosine_similarity(m(x), t)).mean(),
    lambda m, x, t: F.gaussian_nll_loss(m(x), t, torch.ones_like(t)),
    lambda m, x, t: F.poisson_nll_loss(m(x), t.exp()),
    lambda m, x, t: F.binary_cross_entropy_with_logits(m(x), t.sigmoid()),
    lambda m, x, t: F.soft_margin_loss(m(x), t.sign()),
    lambda m, x, t: (m(x) - t).norm(dim=1).mean(),
    lambda m, x, t: (m(x).cumsum(1) - t.cumsum(1)).square().sum(1).mean(),
    lambda m, x, t: (m(x).sort(1).values - t.sort(1).values).square().mean(),
    lambda m, x, t: (m(x).amax(1) - t.amax(1)).square().mean(),
    lambda m, x, t: ((m(x) - m(x).mean(1, keepdim=True)) * t).mean(),
    lambda m, x, t: (
        F.mse_loss(m(x), t) + 0.1 * sum(p.square().sum() for p in m.parameters())
    ),
)
add(
    "",
    "x labels",
    lambda m, x, y: F.cross_entropy(m(x), y),
    lambda m, x, y: F.cross_entropy(m(x), y, label_smoothing=0.2),
    lambda m, x, y: F.nll_loss(m(x).log_softmax(-1), y),
    lambda m, x, y: F.multi_margin_loss(m(x), y),
    lambda m, x, y: (
        F.cross_entropy(m(x), y)
        - 0.1 * torch.distributions.Categorical(logits=m(x)).entropy().mean()
    ),
    lambda m, x, y: (
        (1 - (e := F.cross_entropy(m(x), y, reduction="none")).neg().exp()) ** 2 * e
    ).mean(),
    lambda m, x, y: (
        F.cross_entropy(m(x), y) + 0.01 * m(x).logsumexp(-1).square().mean()
    ),
)
add(
    "",
    "x z",
    lambda m, x, z: F.relu((m(x) - m(z)).norm(dim=1) - 0.1).mean(),
    lambda m, x, z: F.cosine_embedding_loss(m(x), m(z), torch.ones(len(x))),
    lambda m, x, z: F.logsigmoid((m(x) - m(z)).sum(1)).neg().mean(),
    lambda m, x, z: F.kl_div(
        m(x).log_softmax(-1), m(z).detach().softmax(-1), reduction="batchmean"
    ),
)
add(
    "",
    "tokens mask",
    lambda m, x, k: ((m(x)[..., 0].square() * k).sum(1) / k.sum(1)).mean(),
    lambda m, x, k: (m(x)[..., 0].square() * k).sum() / len(x),
    lambda m, x, k: (m(x)[..., 0].square() * k).sum() / k.numel(),
    lambda m, x, k: ((m(x).mean(-1) * k).sum(1)).square().mean(),
)
add("", "x value", lambda m, x, a: -(m(x).log_softmax(-1)[:, 0] * a).mean())
add(
    "",
    "tokens padded",
    lambda m, x, y: F.cross_entropy(m(x).flatten(0, 1), y.flatten()),
    weight=lambda x, y: (y != -100).sum(),
)
add(
    "",
    "tokens mask",
    lambda m, x, k: (m(x)[..., 0].square() * k).sum() / k.sum(),
    weight=lambda x, k: k.sum(),
)
add(
    "",
    "x target",
    lambda m, x, t: (m(x) - t).square().sum(),
    lambda m, x, t: F.mse_loss(m(x), t, reduction="sum"),
    reduction="sum",
)
add(
    "",
    "tokens mask",
    lambda m, x, k: (m(x)[..., 0].square() * k).sum(),
    reduction="sum_per_item",
    weight=lambda x, k: k.sum(),
)
add(
    "",
    "x labels importance",
    lambda m, x, y, w: (F.cross_entropy(m(x), y, reduction="none") * w).mean(),
)
add(
    "",
    "x labels importance",
    lambda m, x, y, w: (F.cross_entropy(m(x), y, reduction="none") * w).sum() / w.sum(),
    weight=lambda x, y, w: w.sum(),
)
for layer in (
    lambda: nn.Dropout(0.3),
    lambda: nn.LayerNorm(8),
    lambda: nn.GroupNorm(2, 8),
    lambda: nn.CELU(),
    lambda: nn.PReLU(),
    lambda: nn.BatchNorm1d(8).eval(),
    lambda: nn.Softmax(-1),
    lambda: nn.SELU(),
    lambda: nn.Hardswish(),
):
    add("", "x labels", lambda m, x, y: F.cross_entropy(m(x), y), layers=(layer,))
add(
    "",
    "x",
    lambda m, x: m(x + torch.randn_like(x)).square().mean(),
    lambda m, x: (m(x) * (1 + 0.1 * torch.rand(len(x), 1))).square().mean(),
)


# Other weights.

add(
    "weights",
    "tokens padded",
    lambda m, x, y: F.cross_entropy(m(x).flatten(0, 1), y.flatten()),
    lambda m, x, y: (
        F.cross_entropy(m(x)[:, :-1].flatten(0, 1), y[:, 1:].flatten(), reduction="sum")
        / (y[:, 1:] != -100).sum().clamp(min=1)
    ),
    lambda m, x, y: F.cross_entropy(m(x).transpose(1, 2), y, label_smoothing=0.1),
)
add(
    "weights",
    "tokens mask",
    lambda m, x, k: (m(x)[..., 0].square() * k).sum() / k.sum(),
    lambda m, x, k: m(x)[k.bool()].square().mean(),
    lambda m, x, k: torch.masked_select(m(x)[..., 1].abs(), k.bool()).mean(),
    lambda m, x, k: (m(x).square().mean(-1) * k).sum() / (k.sum() + 1e-8),
    lambda m, x, k: (m(x)[..., 0].square() * k).sum(),
)
add(
    "weights",
    "x missing",
    lambda m, x, y: F.cross_entropy(m(x), y),
    lambda m, x, y: F.cross_entropy(m(x)[y >= 0], y[y >= 0]),
)
add(
    "weights",
    "x labels",
    lambda m, x, y: F.cross_entropy(m(x), y, weight=torch.tensor([1.0, 2, 5, 3])),
    lambda m, x, y: F.nll_loss(
        m(x).log_softmax(-1), y, weight=torch.tensor([4.0, 1, 1, 2])
    ),
    lambda m, x, y: F.cross_entropy(m(x), y, reduction="sum"),
    lambda m, x, y: F.cross_entropy(m(x), y) + 0.05 * m(x).square().sum(),
)
add(
    "weights",
    "x labels importance",
    lambda m, x, y, w: (F.cross_entropy(m(x), y, reduction="none") * w).sum() / w.sum(),
)
add(
    "weights",
    "x binary",
    lambda m, x, y: (m(x)[:, 0].square() * y).sum() / y.sum().clamp(min=1),
    lambda m, x, y: (m(x)[:, 0].square() * y).sum() / y.sum(),
)
add(
    "weights",
    "tokens lengths",
    lambda m, x, n: (m(x)[:, 0, 0].square() * n).sum() / n.sum(),
)
add(
    "weights",
    "x target",
    lambda m, x, t: F.mse_loss(m(x), t),
    lambda m, x, t: F.mse_loss(m(x), t, reduction="sum") / len(x),
    reduction="sum",
)
add(
    "weights",
    "x target",
    lambda m, x, t: (
        F.mse_loss(m(x), t, reduction="sum")
        + sum(p.square().sum() for p in m.parameters())
    ),
    reduction="sum",
)
add(
    "weights",
    "x target importance",
    lambda m, x, t, w: F.mse_loss(m(x), t),
    weight=lambda x, t, w: w.sum(),
)


# Items that meet.

add(
    "coupled",
    "x z",
    lambda m, x, z: F.cross_entropy(similarity(m(x), m(z)), places(x)),
    lambda m, x, z: (
        (
            F.cross_entropy(s := similarity(m(x), m(z)), places(x))
            + F.cross_entropy(s.T, places(x))
        )
        / 2
    ),
    lambda m, x, z: (
        -F.logsigmoid(similarity(m(x), m(z)) * (2 * torch.eye(len(x)) - 1)).mean()
    ),
    lambda m, x, z: F.relu(
        1
        + (d := torch.cdist(m(x), m(z))).diagonal()
        - (d + 9 * torch.eye(len(x))).amin(1)
    ).mean(),
    lambda m, x, z: (
        ((m(x) - m(x).mean(0)).T @ (m(z) - m(z).mean(0)) / len(x) - torch.eye(CLASSES))
        .square()
        .sum()
    ),
    lambda m, x, z: (
        (m(x) - m(z)).square().mean() + F.relu(1 - m(x).var(0).add(1e-4).sqrt()).mean()
    ),
    lambda m, x, z: (m(x).mean(0) - m(z).mean(0)).square().sum(),
    lambda m, x, z: (torch.cov(m(x).T) - torch.cov(m(z).T)).square().mean(),
    lambda m, x, z: torch.exp(-torch.cdist(m(x), m(z)).square()).mean(),
)
add(
    "coupled",
    "x labels",
    lambda m, x, y: (
        F.cross_entropy(m(x), y, reduction="none")
        .topk(max(len(x) // 2, 1))
        .values.mean()
    ),
    lambda m, x, y: F.cross_entropy(m(x), y, reduction="none").max(),
    lambda m, x, y: F.cross_entropy(m(x), y, reduction="none").square().mean().sqrt(),
    lambda m, x, y: (
        F.cross_entropy(m(x), y)
        - 0.5 * torch.special.entr(m(x).softmax(-1).mean(0)).sum()
    ),
    lambda m, x, y: (
        m(x).softmax(-1).mean(0) * F.one_hot(m(x).argmax(-1), CLASSES).float().mean(0)
    ).sum(),
    lambda m, x, y: (
        1
        - 2
        * (m(x).sigmoid() * F.one_hot(y, CLASSES)).sum()
        / (m(x).sigmoid().sum() + len(x))
    ),
    lambda m, x, y: F.cross_entropy(m(x) - m(x).mean(0), y),
)
add(
    "coupled",
    "x value",
    lambda m, x, v: -(m(x)[:, 0] * (v - v.mean()) / (v.std() + 1e-4)).mean(),
    lambda m, x, v: 1 - torch.corrcoef(torch.stack([m(x)[:, 0], v]))[0, 1],
    lambda m, x, v: F.softplus(
        -(m(x)[:, :1] - m(x)[:, 0]) * (v[:, None] - v).sign()
    ).mean(),
    lambda m, x, v: (m(x)[:, 0] - v).square().sum() / (v - v.mean()).square().sum(),
    lambda m, x, v: -(m(x)[:, 0].log_softmax(0) * v.softmax(0)).sum(),
    lambda m, x, v: (m(x)[:, 0] - v).abs().median(),
)
add(
    "coupled",
    "tokens mask",
    lambda m, x, k: (
        (m(x)[..., 0].square() * k).sum() / k.sum() + m(x)[:, 0].square().mean()
    ),
)
add(
    "coupled",
    "x binary",
    lambda m, x, y: (
        (m(x)[:, 0].square() * y).sum() / y.sum().clamp(min=1)
        + (m(x)[:, 1].square() * (1 - y)).sum() / (1 - y).sum().clamp(min=1)
    ),
)


# State, statistics, numbers, hand-written derivatives.


class Centre(nn.Module):
    """Subtracts a running mean that each forward pass moves."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        out = x - self.mean
        self.mean = 0.8 * self.mean + 0.2 * x.detach().mean(0)
        return out


class Queue(Centre):
    """Compares with what the forward pass before has seen."""

    def forward(self, x: Tensor) -> Tensor:
        out = x + 0.3 * self.mean
        self.mean = x[-1].detach()
        return out


class Warmup(nn.Module):
    """A factor that grows with each forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * min(1.0, 0.1 * self.calls)


class Straight(torch.autograd.Function):
    """Its derivative ignores what it is handed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return torch.ones_like(gradients[0])


class Reversal(Straight):
    """The gradient reversal of domain adaptation, which is linear."""

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return -0.5 * gradients[0]


class Clipped(Straight):
    """A clip of the gradient inside the graph."""

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0].clamp(-1e-3, 1e-3)


class Applied(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function.apply(x)  # type: ignore[no-any-return]


def cross_entropy(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(m(x), y)


for kind, layer in (
    ("hidden_state", Centre),
    ("hidden_state", Queue),
    ("hidden_state", Warmup),
    ("batch_statistics", lambda: nn.BatchNorm1d(8)),
    ("batch_statistics", lambda: nn.BatchNorm1d(8, affine=False)),
    ("batch_statistics", lambda: nn.BatchNorm1d(8, track_running_stats=False)),
    ("custom_backward", lambda: Applied(Straight)),
    ("custom_backward", lambda: Applied(Clipped)),
    ("", lambda: Applied(Reversal)),
):
    add(kind, "x labels", cross_entropy, layers=(layer,))

COUNTER = itertools.count()
add(
    "not_repeatable",
    "x labels",
    lambda m, x, y: F.cross_entropy(m(x), y) * (1 + 0.1 * next(COUNTER)),
    lambda m, x, y: F.cross_entropy(m(x), y) * (1 + time.perf_counter() % 1),
    lambda m, x, y: F.cross_entropy(m(0.7 * x + 0.3 * x[torch.randperm(len(x))]), y),
    lambda m, x, y: F.cross_entropy(
        m(x * torch.from_numpy(np.random.rand(len(x), 1)).float()), y
    ),
    lambda m, x, y: F.cross_entropy(
        m(x * torch.rand(len(x), 1, generator=torch.Generator().manual_seed(3))), y
    ),
)
add(
    "not_finite",
    "x target",
    lambda m, x, t: torch.where(m(x) > 0, m(x).sqrt(), 0.0).mean(),
    lambda m, x, t: (m(x) - m(x)).norm(dim=1).mean() / 0.0,
    lambda m, x, t: (m(x) * float("inf")).mean(),
)


def cases() -> Iterator[tuple[Invented, nn.Module, tuple[Tensor, ...]]]:
    for invented in LOSSES:
        batch = tuple(arrays()[name] for name in invented.batch)
        yield invented, model_of(invented.layers), batch
