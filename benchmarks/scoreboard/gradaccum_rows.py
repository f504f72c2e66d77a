"""The rows of this package: the front page's loop, on the items of the others."""

from __future__ import annotations

from functools import partial

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
from conformance_tests.integration_tests.regression import Items, Regressor, loss_of


def trained(count: int, micro: bool) -> Gradients:
    net = Regressor()
    loader = DataLoader(Items(count), batch_size=MICRO if micro else count)
    return moved(net, partial(loop, net, sgd(net), loader, STEPS if micro else 1))


def loop(
    net: nn.Module,
    inner: Optimizer,
    loader: DataLoader[dict[str, object]],
    steps: int,
) -> None:
    optimizer = gradaccum.wrap(inner, steps=steps)
    for batch in optimizer.epoch(loader):
        optimizer.backward(loss_of(net, batch), weight=len(batch["x"]))
        optimizer.step()
        optimizer.zero_grad()


def short_batch(*, micro: bool, even: bool) -> Gradients:
    return trained(FULL if even else SHORT_BATCH, micro)


def short_window(*, micro: bool, even: bool) -> Gradients:
    return trained(FULL if even else SHORT_WINDOW, micro)


def check(count: int) -> gradaccum.LoopReport:
    net = Regressor()
    inner = sgd(net)
    loader = DataLoader(Items(count), batch_size=MICRO)
    return regression_check(net, inner, partial(loop, net, inner, loader, STEPS), count)


CHECKED = {
    "short_batch": partial(check, SHORT_BATCH),
    "short_window": partial(check, SHORT_WINDOW),
}
