"""A Lightning module under a wrapped optimizer, its trainer, and the bare optimizer's
run of the large batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import gradaccum
from gradaccum_torch.integrations.lightning import AccumulationCallback

from .regression import X, Y, make_net, mean_square

WARNINGS = (
    "ignore:`isinstance.treespec, LeafSpec.` is deprecated",
    "ignore:The '.*_dataloader' does not have many workers",
    "ignore:`lightning_utilities.core.rank_zero",
    "ignore:Be aware that when using `ckpt_path`",
    "ignore:Using ModelCheckpoint with manual optimization",
)
"""Lightning's own."""


def inner_of(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)


def falling(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)


class Automatic(pl.LightningModule):
    """Lightning runs the optimizer and a scheduler; `options` are those of
    `gradaccum.wrap`, None: both stay bare.
    """

    def __init__(self, options: dict[str, Any] | None) -> None:
        super().__init__()
        self.net = make_net()
        self.options = options

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor | None:
        return mean_square(self.net, *batch)

    def configure_optimizers(self) -> Any:
        opt = inner_of(self.net)
        scheduler = falling(opt)
        if self.options is not None:
            opt = gradaccum.wrap(opt, steps=4, **self.options)
            scheduler = gradaccum.wrap(falling(opt))
        return [opt], [{"scheduler": scheduler, "interval": "step"}]


class Manual(Automatic):
    """The user's loop inside ``training_step``."""

    automatic_optimization = False

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> None:
        opt = self.optimizers()
        opt.zero_grad()
        self.manual_backward(mean_square(self.net, *batch))
        opt.step()
        self.lr_schedulers().step()


def loader(
    rows: int = 26, size: int = 2, dtype: torch.dtype = torch.float64
) -> DataLoader[Any]:
    """13 micro-batches of two rows: three windows of four, and one of one."""
    data = TensorDataset(X[:rows].to(dtype), Y[:rows].to(dtype))
    return DataLoader(data, batch_size=size)


def trainer(*callbacks: pl.Callback, **options: Any) -> pl.Trainer:
    """Without `callbacks`, with the callback that accumulation needs."""
    defaults = {
        "accelerator": "cpu",
        "max_epochs": 2,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "callbacks": list(callbacks or (AccumulationCallback(),)),
    }
    return pl.Trainer(**{**defaults, **options})


def large(epochs: int = 2, rows: int = 26) -> nn.Module:
    """The bare optimizer's run: one step per window, the epoch's last one of what is
    left.
    """
    model = Automatic(None)
    trainer(pl.Callback(), max_epochs=epochs).fit(model, loader(rows, 8))
    net = model.net
    return net
