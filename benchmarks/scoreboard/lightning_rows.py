"""The rows of Lightning's Trainer."""

from __future__ import annotations

from functools import partial
from typing import Any

import lightning.pytorch as pl
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

QUIET: dict[str, Any] = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


class Module(pl.LightningModule):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.net = Regressor()
        self.sgd = sgd(self)

    def training_step(self, batch: Any, index: int) -> Any:
        return loss_of(self.net, batch)

    def configure_optimizers(self) -> Optimizer:
        return self.sgd


def trained(count: int, micro: bool) -> Gradients:
    module = Module()
    return moved(module, lambda: train(module, count, micro))


def train(module: Module, count: int, micro: bool) -> None:
    loader = DataLoader(Items(count), batch_size=MICRO if micro else count)
    trainer = pl.Trainer(
        max_epochs=1,
        accelerator="cpu",
        accumulate_grad_batches=STEPS if micro else 1,
        **QUIET,
    )
    trainer.fit(module, loader)


def short_batch(*, micro: bool, even: bool) -> Gradients:
    return trained(FULL if even else SHORT_BATCH, micro)


def short_window(*, micro: bool, even: bool) -> Gradients:
    return trained(FULL if even else SHORT_WINDOW, micro)


def check(count: int) -> gradaccum.LoopReport:
    module = Module()
    run = partial(train, module, count, True)
    return regression_check(module.net, module.sgd, run, count)


CHECKED = {
    "short_batch": partial(check, SHORT_BATCH),
    "short_window": partial(check, SHORT_WINDOW),
}
