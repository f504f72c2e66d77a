"""Losses as people write them, each in a few lines, and whether they accumulate: the
kind of cause, or "" for a right one. They judge how often `verify` is right.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributions import Categorical
from torch.nn import functional as F
from torch.nn.functional import cross_entropy, mse_loss

ITEMS = 12
TOKENS = 6
WIDTH = 5
CLASSES = 4


class Invented(NamedTuple):
    """One loss, of the model and the batch, or of the model's output and targets."""

    name: str
    kind: str
    loss: Callable[..., Tensor]
    batch: tuple[Any, ...]
    options: dict[str, Any]
    layers: tuple[Callable[[], nn.Module], ...]
    """Between the model's two linear layers."""
    where: str
    """The place that the first cause names; "" if it is not compared."""

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        layers = [layer() for layer in self.layers]
        return nn.Sequential(
            nn.Linear(WIDTH, 8), *layers, nn.Tanh(), nn.Linear(8, CLASSES)
        )


torch.manual_seed(0)
MASK = (
    torch.arange(TOKENS) < torch.tensor([[1, 6, 2, 5, 3, 4, 6, 1, 1, 5, 6, 2]]).T
).float()
LABELS = torch.randint(0, CLASSES, (ITEMS,))
TOKEN_LABELS = torch.randint(0, CLASSES, (ITEMS, TOKENS))
ARRAYS: dict[str, Any] = {
    "x": torch.randn(ITEMS, WIDTH),
    "z": torch.randn(ITEMS, WIDTH),
    "tokens": torch.randn(ITEMS, TOKENS, WIDTH),
    "target": torch.randn(ITEMS, CLASSES),
    "value": torch.randn(ITEMS),
    "labels": LABELS,
    "padded": torch.where(MASK > 0, TOKEN_LABELS, -100),
    "missing": torch.where(MASK[:, 2] > 0, LABELS, -100),
    "mask": MASK,
    "binary": torch.tensor([0.0, 1, 1, 0, 1, 0, 0, 0, 1, 0, 0, 0]),
    "importance": torch.tensor([1.0, 3, 2, 5, 1, 1, 4, 2, 1, 6, 1, 3]),
}
ARRAYS["dictionary"] = {"states": ARRAYS["tokens"], "kept": MASK}
LOSSES: list[Invented] = []


def add(
    kind: str,
    batch: str,
    *losses: Callable[..., Tensor],
    layers: tuple[Callable[[], nn.Module], ...] = (),
    where: str = "",
    **options: Any,
) -> None:
    arrays = tuple(ARRAYS[name] for name in batch.split())
    for loss in losses:
        name = f"{len(LOSSES)} {kind or 'right'} {batch}"
        LOSSES.append(Invented(name, kind, loss, arrays, options, layers, where))


def of_each(out: Tensor, y: Tensor) -> Tensor:
    return cross_entropy(out, y, reduction="none")


def contrast(m: nn.Module, x: Tensor, z: Tensor) -> Tensor:
    scores = F.normalize(m(x), dim=-1) @ F.normalize(m(z), dim=-1).T / 0.5
    return cross_entropy(scores, torch.arange(len(scores)))


def weighted_sum(out: Tensor, weights: Tensor) -> Tensor:
    return (out[..., 0].square() * weights).sum()


def weighted_mean(out: Tensor, weights: Tensor) -> Tensor:
    return weighted_sum(out, weights) / weights.sum()


def token_loss(out: Tensor, y: Tensor) -> Tensor:
    return cross_entropy(out.flatten(0, 1), y.flatten())


# Means over items.

add(
    "",
    "x target",
    mse_loss,
    F.l1_loss,
    lambda out, t: F.kl_div(out.log_softmax(-1), t.softmax(-1), reduction="batchmean"),
    lambda out, t: (1 - F.cosine_similarity(out, t)).mean(),
    lambda out, t: (out - t).norm(dim=1).mean(),
    lambda out, t: (out.sort(1).values - t.sort(1).values).square().mean(),
    lambda m, x, t: (
        mse_loss(m(x), t) + 0.1 * sum(p.square().sum() for p in m.parameters())
    ),
)
add(
    "",
    "x labels",
    F.multi_margin_loss,
    partial(cross_entropy, label_smoothing=0.2),
    lambda out, y: (
        cross_entropy(out, y) - 0.1 * Categorical(logits=out).entropy().mean()
    ),
    lambda out, y: ((1 - (-of_each(out, y)).exp()) ** 2 * of_each(out, y)).mean(),
    lambda out, y: cross_entropy(out, y) + 0.01 * out.logsumexp(-1).square().mean(),
    lambda out, y: cross_entropy(out, y) * 1e30,
    lambda out, y: (
        cross_entropy(out * np.random.beta(1.0, 1.0) + np.random.randn(), y)
        * random.random()
    ),
)
add(
    "",
    "x z",
    lambda m, x, z: F.relu((m(x) - m(z)).norm(dim=1) - 0.1).mean(),
    lambda m, x, z: F.cosine_embedding_loss(m(x), m(z), torch.ones(len(x))),
)
add(
    "",
    "tokens mask",
    lambda out, k: ((out[..., 0].square() * k).sum(1) / k.sum(1)).mean(),
    lambda out, k: weighted_sum(out, k) / len(out),
    lambda out, k: weighted_sum(out, k) / k.numel(),
    lambda out, k: ((out.mean(-1) * k).sum(1)).square().mean(),
)
add("", "x value", lambda out, a: -(out.log_softmax(-1)[:, 0] * a).mean())
add("", "x labels importance", lambda out, y, w: (of_each(out, y) * w).mean())
add(
    "",
    "x",
    lambda m, x: m(x + torch.randn_like(x)).square().mean(),
    lambda out: (out * (1 + 0.1 * torch.rand(len(out), 1))).square().mean(),
)


# Other weights.

add("weights", "tokens padded", token_loss)
add(
    "weights",
    "tokens padded",
    lambda out, y: token_loss(out[:, :-1], y[:, 1:]).nan_to_num(),
    where="(batch[1][:, 1:] != -100).sum()",
)
add(
    "weights",
    "dictionary",
    lambda m, batch: weighted_mean(m(batch["states"]), batch["kept"]),
    where="(batch[0]['kept'] != 0).sum()",
)
add(
    "weights",
    "tokens mask",
    weighted_sum,
    lambda out, k: out[k.bool()].square().mean(),
)
add("weights", "x missing", lambda out, y: cross_entropy(out[y >= 0], y[y >= 0]))
add(
    "weights",
    "x missing",
    cross_entropy,
    layers=(nn.Dropout,),
    where="(batch[1] != -100).sum()",
)
add(
    "coupled",
    "x labels",
    lambda out, y: cross_entropy(out, y) + 0.05 * out.square().sum(),
)
add(
    "weights",
    "x labels",
    partial(cross_entropy, weight=torch.tensor([1.0, 2, 5, 3])),
    where="the denominator of the loss",
)
add(
    "weights",
    "x target importance",
    lambda out, t, w: mse_loss(out, t),
    weight=lambda x, t, w: w.sum(),
)


# Items that meet.

add(
    "coupled",
    "x z",
    contrast,
    lambda m, x, z: F.relu(
        1
        + torch.cdist(m(x), m(z)).diagonal()
        - (torch.cdist(m(x), m(z)) + 9 * torch.eye(len(x))).amin(1)
    ).mean(),
    lambda m, x, z: (
        mse_loss(m(x), m(z)) + F.relu(1 - m(x).var(0).add(1e-4).sqrt()).mean()
    ),
    lambda m, x, z: (m(x).mean(0) - m(z).mean(0)).square().sum(),
    lambda m, x, z: (torch.cov(m(x).T) - torch.cov(m(z).T)).square().mean(),
    lambda m, x, z: torch.exp(-torch.cdist(m(x), m(z)).square()).mean(),
)
add(
    "coupled",
    "x labels",
    lambda out, y: of_each(out, y).topk(max(len(out) // 2, 1)).values.mean(),
    lambda out, y: of_each(out, y).square().mean().sqrt(),
    lambda out, y: (
        cross_entropy(out, y) - 0.5 * torch.special.entr(out.softmax(-1).mean(0)).sum()
    ),
    lambda out, y: cross_entropy(out - out.mean(0), y),
)
add(
    "coupled",
    "x value",
    lambda out, v: 1 - torch.corrcoef(torch.stack([out[:, 0], v]))[0, 1],
    lambda out, v: F.softplus(
        -(out[:, :1] - out[:, 0]) * (v[:, None] - v).sign()
    ).mean(),
    lambda out, v: (out[:, 0] - v).square().sum() / (v - v.mean()).square().sum(),
    lambda out, v: -(out[:, 0].log_softmax(0) * v.softmax(0)).sum(),
    lambda out, v: (out[:, 0] - v).abs().median(),
)
add(
    "coupled",
    "tokens mask",
    lambda out, k: weighted_mean(out, k) + 1e-3 * out.mean().square(),
    weight=lambda x, k: k.sum(),
)
add(
    "coupled",
    "x binary",
    lambda out, y: (
        weighted_sum(out, y) / y.sum().clamp(min=1)
        + weighted_sum(out, 1 - y) / (1 - y).sum().clamp(min=1)
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


class Warmup(nn.Module):
    """A factor that grows with each forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * min(1.0, 0.1 * self.calls)


class Counts(Centre):
    """Changes state that is read for nothing but a log."""

    def forward(self, x: Tensor) -> Tensor:
        super().forward(x)
        return x


class GhostNorm(nn.Module):
    """Statistics of each two consecutive items, in evaluation mode too: a partition in
    order changes nothing.
    """

    def forward(self, x: Tensor) -> Tensor:
        if len(x) % 2:
            return x
        pairs = x.unflatten(0, (-1, 2))
        return (pairs - pairs.mean(1, keepdim=True)).flatten(0, 1)


class ItemsAttend(nn.MultiheadAttention):
    """Attention along the batch axis."""

    def __init__(self) -> None:
        super().__init__(8, 2)

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x, x, x, need_weights=False)[0]


class Cancels(nn.Module):
    """0.1 + 0.2 - 0.3, in a kink, is zero or not by the order of the addition."""

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(1, keepdim=True)
        return F.relu(x - mean) + F.relu(x.sum(1, keepdim=True) - 8 * mean)


class Drops(nn.Module):
    """A layer left out or not for all items at once, by torch's random numbers and by
    Python's.
    """

    def forward(self, x: Tensor) -> Tensor:
        factor = 2 if random.random() < 0.5 else 1
        return x * factor * (3 if torch.rand(()).item() < 0.5 else 1)


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


for kind, layer, where in (
    ("", lambda: nn.Dropout(0.3), ""),
    ("", lambda: nn.LayerNorm(8), ""),
    ("", lambda: nn.GroupNorm(2, 8), ""),
    ("", nn.CELU, ""),
    ("", nn.PReLU, ""),
    ("", lambda: nn.BatchNorm1d(8).eval(), ""),
    ("", lambda: nn.Softmax(-1), ""),
    ("", Counts, ""),
    ("", Cancels, ""),
    ("", Drops, ""),
    ("", lambda: Applied(Reversal), ""),
    ("coupled", GhostNorm, "the loss"),
    ("coupled", ItemsAttend, "the loss"),
    ("hidden_state", Centre, "1.mean"),
    ("hidden_state", Warmup, "1.calls"),
    ("batch_statistics", lambda: nn.BatchNorm1d(8), "1"),
    ("batch_statistics", lambda: nn.BatchNorm1d(8, affine=False), "1"),
    ("batch_statistics", lambda: nn.BatchNorm1d(8, track_running_stats=False), "1"),
    ("custom_backward", lambda: Applied(Straight), "0.weight, 0.bias"),
    ("custom_backward", lambda: Applied(Clipped), "0.weight, 0.bias"),
):
    add(kind, "x labels", cross_entropy, layers=(layer,), where=where)

COUNTER = itertools.count()
add(
    "not_repeatable",
    "x labels",
    lambda out, y: cross_entropy(out, y) * (1 + 0.1 * next(COUNTER)),
    where="outside of the model",
)
add(
    "not_repeatable",
    "x labels",
    lambda out, y: cross_entropy(out, y) * (1 + time.perf_counter() % 1),
    lambda m, x, y: cross_entropy(m(0.7 * x + 0.3 * x[torch.randperm(len(x))]), y),
    lambda m, x, y: cross_entropy(
        m(x * torch.rand(len(x), 1, generator=torch.Generator().manual_seed(3))), y
    ),
    lambda out, y: (
        of_each(out, y) * torch.tensor([random.gauss(1.0, 0.5) for _ in y])
    ).mean(),
)
add(
    "not_finite",
    "x target",
    lambda out, t: torch.where(out > 0, out.sqrt(), 0.0).mean(),
    lambda out, t: (out - out).norm(dim=1).mean() / 0.0,
)
