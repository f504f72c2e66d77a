"""Small models, each with one published mistake in a layer, its random numbers or its
state, and what `verify` has to say about it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from conformance_tests.framework_tests.torch_cases import (
    CLASSES,
    TOKENS,
    WIDTH,
    Case,
    classes,
    cross_entropy,
    inputs,
    net,
)


class GhostNorm(nn.Module):
    """Statistics of each two consecutive items, in evaluation mode too."""

    def forward(self, x: Tensor) -> Tensor:
        pairs = x.unflatten(0, (-1, 2))
        return (
            (pairs - pairs.mean(1, keepdim=True))
            / (pairs.var(1, keepdim=True) + 0.1).sqrt()
        ).flatten(0, 1)


def ghost_norm() -> Case:
    """The partition in order does not move: only other orders show it."""
    return Case(net(GhostNorm()), cross_entropy, (inputs(WIDTH), classes()))


class SeededNoise(nn.Module):
    """Reproducible noise, as they say."""

    def forward(self, x: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        return x * (torch.rand(x.shape, generator=generator) > 0.5)


def seed_in_forward() -> Case:
    return Case(net(SeededNoise()), cross_entropy, (inputs(WIDTH), classes()))


class RunningCentre(nn.Module):
    """Centres by a running mean of the micro-batches before this one."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        out = x - self.centre
        self.centre.mul_(0.5).add_(x.detach().mean(0), alpha=0.5)
        return out


def running_statistics() -> Case:
    return Case(
        net(RunningCentre(), nn.Tanh()), cross_entropy, (inputs(WIDTH), classes())
    )


def reward_baseline() -> Case:
    """A baseline in a variable that the loss function closes over."""
    baseline = 0.0

    def loss(model: nn.Module, x: Tensor, rewards: Tensor) -> Tensor:
        nonlocal baseline
        found = -(F.log_softmax(model(x), -1)[:, 0] * (rewards - baseline)).mean()
        baseline = 0.9 * baseline + 0.1 * float(rewards.mean())
        return found

    return Case(net(), loss, (inputs(WIDTH), inputs() + 2))


def frozen_attention_axis() -> Case:
    """`nn.MultiheadAttention` takes the second axis for the batch unless told: the
    items attend to each other.
    """

    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.attention, self.head = (
                nn.MultiheadAttention(4, 2),
                nn.Linear(4, CLASSES),
            )

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.attention(x, x, x, need_weights=False)[0].mean(1))

    return Case(Attends(), cross_entropy, (inputs(TOKENS, 4), classes()))


MISTAKEN_LAYERS: dict[Callable[[], Case], tuple[tuple[str, ...], str]] = {
    ghost_norm: (("coupled",), "the loss"),
    seed_in_forward: (("not_repeatable",), "the loss"),
    running_statistics: (("hidden_state",), "1.centre"),
    reward_baseline: (("not_repeatable",), "outside of the model"),
    frozen_attention_axis: (("coupled",), "the loss"),
}
"""By case: the kinds of its causes, in order, and the place of the first one."""
