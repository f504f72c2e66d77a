"""The sizes of windows that the rows of PyTorch's packages share, and a gradient read
from how far SGD moved each parameter.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

import gradaccum
from conformance_tests.integration_tests.regression import Items

MICRO, STEPS = 2, 4
"""Items of a micro-batch, micro-batches of a window."""
SHORT_BATCH, SHORT_WINDOW, FULL = 7, 6, 8
"""Items of an epoch: micro-batches of 2, 2, 2 and 1; of 2, 2 and 2 in a window of four;
four of 2.
"""


def moved(
    model: nn.Module, train: Callable[[], object], rate: float = 1.0
) -> dict[str, NDArray[np.float64]]:
    """By parameter, how far `train` moved it, by the rate."""
    before = {name: each.detach().clone() for name, each in model.named_parameters()}
    train()
    return {
        name: ((before[name] - each.detach().cpu()).double() / rate).numpy()
        for name, each in model.named_parameters()
    }


def micro_batches(count: int) -> list[tuple[Tensor, Tensor]]:
    """The regression's items as the packages' loaders cut them."""
    items = Items(count)
    return list(zip(items.x.split(MICRO), items.labels.split(MICRO), strict=True))


def regression_check(
    net: nn.Module,
    optimizer: torch.optim.Optimizer,
    train: Callable[[], object],
    count: int,
) -> gradaccum.LoopReport:
    """Check a loop that trains the regression on `count` items."""
    return gradaccum.check_loop(
        train,
        optimizer,
        lambda x, labels: net(x, labels)["loss"],
        micro_batches(count),
        steps=STEPS,
    )


def sgd(model: nn.Module, rate: float = 1.0) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=rate)
