"""The rows of Accelerate: the two loops of its guide to gradient accumulation."""

from __future__ import annotations

from functools import partial
from typing import Any

from accelerate import Accelerator
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

import gradaccum
from benchmarks.scoreboard.measuring import Gradients
from benchmarks.scoreboard.torch_models import (
    FULL,
    MICRO,
    SHORT_BATCH,
    SHORT_WINDOW,
    STEPS,
    moved,
    regression_check,
    sgd,
)
from conformance_tests.integration_tests.regression import Items, Regressor


def trained(count: int, micro: bool, loop: Any) -> Gradients:
    net = Regressor()
    return moved(net, partial(train, net, sgd(net), count, micro, loop))


def train(
    net: nn.Module, optimizer: Optimizer, count: int, micro: bool, loop: Any
) -> None:
    accelerator = Accelerator(
        cpu=True, gradient_accumulation_steps=STEPS if micro else 1
    )
    loader = DataLoader(Items(count), batch_size=MICRO if micro else count)
    loop(accelerator, *accelerator.prepare(net, optimizer, loader))


def accumulate(
    accelerator: Accelerator, model: nn.Module, optimizer: Any, loader: Any
) -> None:
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch)["loss"])
            optimizer.step()
            optimizer.zero_grad()


def by_count(
    accelerator: Accelerator, model: nn.Module, optimizer: Any, loader: Any
) -> None:
    """The guide's loop for samples of variable size: a sum, divided by what the whole
    window counts.
    """
    batches = list(loader)
    count = sum(len(batch["labels"]) for batch in batches)
    for batch in batches:
        loss = (model(**batch)["logits"] - batch["labels"]).square().sum()
        accelerator.backward(loss * accelerator.gradient_accumulation_steps / count)
    optimizer.step()
    optimizer.zero_grad()


def short_batch(*, micro: bool, even: bool) -> Gradients:
    return trained(FULL if even else SHORT_BATCH, micro, accumulate)


def short_window(*, micro: bool, even: bool) -> Gradients:
    return trained(FULL if even else SHORT_WINDOW, micro, accumulate)


def counted(*, micro: bool, even: bool) -> Gradients:
    return trained(FULL if even else SHORT_BATCH, micro, by_count)


def check(count: int, loop: Any) -> gradaccum.LoopReport:
    net = Regressor()
    optimizer = sgd(net)
    run = partial(train, net, optimizer, count, True, loop)
    return regression_check(net, optimizer, run, count)


CHECKED = {
    "short_batch": partial(check, SHORT_BATCH, accumulate),
    "short_window": partial(check, SHORT_WINDOW, accumulate),
    "counted": partial(check, SHORT_BATCH, by_count),
}
