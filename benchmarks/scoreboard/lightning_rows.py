"""The rows of Lightning's Trainer."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from benchmarks.scoreboard.measuring import Gradients
from benchmarks.scoreboard.torch_models import (
    FULL,
    MICRO,
    SHORT_BATCH,
    SHORT_WINDOW,
    STEPS,
    moved,
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

    def training_step(self, batch: Any, index: int) -> Any:
        return loss_of(self.net, batch)

    def configure_optimizers(self) -> Optimizer:
        return sgd(self)


def trained(count: int, micro: bool) -> Gradients:
    module, loader = (
        Module(),
        DataLoader(Items(count), batch_size=MICRO if micro else count),
    )
    trainer = pl.Trainer(
        max_epochs=1,
        accelerator="cpu",
        accumulate_grad_batches=STEPS if micro else 1,
        **QUIET,
    )
    return moved(module, lambda: trainer.fit(module, loader))


def short_batch(*, micro: bool, even: bool) -> Gradients:
    return trained(FULL if even else SHORT_BATCH, micro)


def short_window(*, micro: bool, even: bool) -> Gradients:
    return trained(FULL if even else SHORT_WINDOW, micro)
