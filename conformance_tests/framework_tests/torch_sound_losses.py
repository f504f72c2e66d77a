"""Losses, dtypes and batches for which accumulation is right: nothing in them may be
taken for a mistake.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from conformance_tests.framework_tests.torch_cases import (
    WIDTH,
    Case,
    classes,
    cross_entropy,
    inputs,
    net,
)


def linear_float32() -> Case:
    return Case(net(nn.GELU()), cross_entropy, (inputs(WIDTH), classes()))


def linear_bfloat16() -> Case:
    return Case(net().bfloat16(), cross_entropy, (inputs(WIDTH).bfloat16(), classes()))


def autocast() -> Case:
    """float32 parameters, computed with in bfloat16: one rounding is bfloat16's."""

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return F.cross_entropy(model(x).float(), y)

    return Case(net(), loss, (inputs(WIDTH), classes()))


def unused_and_constant_parameters() -> Case:
    """One that the loss never reaches, one whose gradient is zero everywhere, one that
    is frozen.
    """

    class Partly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.unused, self.zero = (
                net(),
                nn.Linear(2, 2),
                nn.Parameter(torch.ones(3)),
            )
            self.inner[0].bias.requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x) + (self.zero * 0).sum()

    return Case(Partly(), cross_entropy, (inputs(WIDTH), classes()))


def kinks() -> Case:
    """Whole numbers: every activation lies in a kink of the ReLU, or cancels to it
    exactly.
    """
    model = net(nn.ReLU())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_((parameter * 5).round())
    return Case(model, cross_entropy, (inputs(WIDTH).round(), classes()))


def cancelling_kinks() -> Case:
    """0.1 + 0.2 - 0.3 is zero or not by the order of the addition."""

    class Cancels(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.relu(x - x.mean(1, keepdim=True)) + F.relu(
                x.sum(1, keepdim=True) - 4 * x.mean(1, keepdim=True)
            )

    return Case(net(Cancels()), cross_entropy, (inputs(WIDTH), classes()))


def huge() -> Case:
    return Case(
        net(),
        lambda model, x, y: cross_entropy(model, x, y) * 1e30,
        (inputs(WIDTH), classes()),
    )


def nested_batch() -> Case:
    """A dict, a flag, and an array that every micro-batch gets in full."""

    def loss(
        model: nn.Module, batch: dict[str, Any], scale: Tensor, flag: bool
    ) -> Tensor:
        assert flag
        return F.cross_entropy(model(batch["x"]) * scale, batch["y"])

    batch = {"x": inputs(WIDTH), "y": classes()}
    return Case(
        net(),
        loss,
        (batch, torch.tensor([1.0, 2.0, 3.0]), True),
        {"axes": (0, None, None)},
    )


def drawn_once_per_micro_batch() -> Case:
    """Numbers of NumPy and Python that do not belong to items."""

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return (
            F.cross_entropy(
                model(x) * np.random.beta(1.0, 1.0)
                + torch.from_numpy(np.random.randn(3)).float(),
                y,
            )
            * random.random()
        )

    return Case(net(), loss, (inputs(WIDTH), classes()))


def functional_criterion() -> Case:
    """With options of its own; its other arguments have defaults."""
    return Case(
        net(),
        functools.partial(F.cross_entropy, label_smoothing=0.1),
        (inputs(WIDTH), classes()),
    )


def criterion_of_the_users() -> Case:
    def focal(logits: Tensor, target: Tensor, gamma: float = 2.0) -> Tensor:
        each = F.cross_entropy(logits, target, reduction="none")
        return ((1 - (-each).exp()) ** gamma * each).mean()

    return Case(net(), focal, (inputs(WIDTH), classes()))


def criterion_and_a_list() -> Case:
    """As torch's DataLoader yields a batch."""
    return Case(net(), nn.CrossEntropyLoss(), [inputs(WIDTH), classes()])


def loss_that_closes_over_its_model() -> Case:
    model = net()
    return Case(
        model, lambda x, y: F.cross_entropy(model(x), y), (inputs(WIDTH), classes())
    )


def method_of_a_trainer() -> Case:
    """Which holds the model compiled."""

    class Trainer:
        def __init__(self, model: nn.Module) -> None:
            self.model = torch.compile(model, backend="eager")

        def loss(self, x: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(self.model(x), y)

    model = net()
    return Case(model, Trainer(model).loss, (inputs(WIDTH), classes()))


SOUND_LOSSES: tuple[Callable[[], Case], ...] = (
    linear_float32,
    linear_bfloat16,
    autocast,
    unused_and_constant_parameters,
    kinks,
    cancelling_kinks,
    huge,
    nested_batch,
    drawn_once_per_micro_batch,
    functional_criterion,
    criterion_of_the_users,
    criterion_and_a_list,
    loss_that_closes_over_its_model,
    method_of_a_trainer,
)
