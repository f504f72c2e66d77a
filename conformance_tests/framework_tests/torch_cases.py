"""The parts of the small models on which `verify` is tried."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

ITEMS, TOKENS, WIDTH, CLASSES = 8, 6, 5, 3
LENGTHS = (6, 2, 5, 1, 6, 3, 4, 2)
"""Tokens of each item that are no padding."""


class Case(NamedTuple):
    """What `verify` is called with."""

    model: nn.Module
    loss_fn: Callable[..., Tensor]
    batch: tuple[Any, ...] | list[Any]
    options: dict[str, Any] = {}  # noqa: RUF012


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """These models are so small that threads only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)


def inputs(*shape: int) -> Tensor:
    torch.manual_seed(len(shape))
    return torch.randn(ITEMS, *shape)


def classes() -> Tensor:
    return torch.tensor([0, 1, 2, 0, 1, 1, 2, 0])


def mask() -> Tensor:
    return (torch.arange(TOKENS) < torch.tensor(LENGTHS)[:, None]).long()


def net(*layers: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(WIDTH, 4), *(layers or (nn.Tanh(),)), nn.Linear(4, CLASSES)
    )


def cross_entropy(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)
