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

STEPS, ROWS = 4, 2
X = torch.randn(26, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
Y = X.sum(dim=1, keepdim=True).sin()
"""13 micro-batches of two rows: three windows of four, and one of one."""

WARNINGS = (
    (
        "ignore:`isinstance.treespec, LeafSpec.` is deprecated, use"
        " `isinstance.treespec, TreeSpec. and treespec.is_leaf..` instead"
    ),
    "ignore:The '.*_dataloader' does not have many workers which may be a bottleneck.",
    "ignore:`lightning_utilities.core.rank_zero",
    (
        "ignore:Be aware that when using `ckpt_path`, callbacks used to create the"
        " checkpoint need to be provided"
    ),
    (
        "ignore:Using ModelCheckpoint with manual optimization and every_n_train_steps,"
        " but no pre-optimization state was saved."
    ),
)
"""Lightning's own."""


def make_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1)).double()


def inner_of(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)


def halved(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)


def loss_of(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return (net(x) - y).square().mean()


class Automatic(pl.LightningModule):
    """Lightning runs the optimizer; `options` are those of `gradaccum.wrap`, None: the
    optimizer stays bare.
    """

    def __init__(self, options: dict[str, Any] | None, gate: bool = False) -> None:
        super().__init__()
        self.net, self.options, self.gate = make_net(), options, gate

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor | None:
        return loss_of(self.net, *batch)

    def configure_optimizers(self) -> Any:
        inner = inner_of(self.net)
        opt = (
            inner
            if self.options is None
            else gradaccum.wrap(inner, **{"steps": STEPS, **self.options})
        )
        if not self.gate:
            return opt
        scheduler = halved(opt)
        gated = scheduler if self.options is None else gradaccum.wrap(scheduler)
        return {
            "optimizer": opt,
            "lr_scheduler": {"scheduler": gated, "interval": "step"},
        }


class Manual(Automatic):
    """The user's loop inside ``training_step``."""

    automatic_optimization = False

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> None:
        opt = self.optimizers()
        opt.zero_grad()
        self.manual_backward(loss_of(self.net, *batch))
        opt.step()
        if self.gate:
            self.lr_schedulers().step()


def loader(
    rows: int = 26, size: int = ROWS, dtype: torch.dtype = torch.float64
) -> DataLoader[Any]:
    return DataLoader(
        TensorDataset(X[:rows].to(dtype), Y[:rows].to(dtype)), batch_size=size
    )


def trainer(*callbacks: pl.Callback, **options: Any) -> pl.Trainer:
    quiet = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
    }
    given = {"callbacks": list(callbacks or (AccumulationCallback(),))}
    return pl.Trainer(
        accelerator="cpu", **{"max_epochs": 2, **quiet, **given, **options}
    )


def large(epochs: int = 2, gate: bool = False, rows: int = 26) -> nn.Module:
    """The bare optimizer's run: one step per window, the epoch's last one of what is
    left.
    """
    model = Automatic(None, gate)
    run = trainer(pl.Callback(), max_epochs=epochs)
    run.fit(model, loader(rows, STEPS * ROWS))
    net: nn.Module = model.net
    return net
